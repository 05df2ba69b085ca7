"""Which kernel family and which tiles serve a shape: the one table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnloom.core.devices import capability, has_little_shared, indexed
from attnloom.core.settings import settings
from attnloom.core.variant import Variant

CHUNK_TOKENS = 2048
"""Tokens of a chunk of KV in the batch_invariant mode: long enough that a state weighs little beside what it was made
of, short enough that a long request feeds many workers. Every family has the same."""

_CHUNK_ROWS = 1024


def chunk_room(tile_q: int) -> int:
    """States of chunks that a worker on a GPU may leave to others, at most (PlanHeader.chunk_room).

    A host that does not know the lengths must have room for any, so the planner cuts items accordingly: rarely
    elsewhere than it would, since a worker's share is seldom this many chunks.

    Args:
        tile_q: folded rows of a state.
    """
    return max(2, _CHUNK_ROWS // tile_q)


HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_GROUP = 128


@dataclass(frozen=True)
class Costs:
    """What an item costs, in integer units of one family.

    ``item + item_row * rows + kv_tiles * (kv_tile + row * rows)``, for a query tile of so many folded rows.

    Attributes:
        item: what it takes beside its KV tiles, whatever its rows; at least 1.
        item_row: loading a folded row of Q, writing it or its partial state.
        kv_tile: reading one KV tile.
        row: computing one folded row on one KV tile.
    """

    item: int
    item_row: int
    kv_tile: int
    row: int

    def of(self, rows: int, kv_tiles: int) -> int:
        """Of an item, or of a piece of one: each loads its rows and writes them or their states."""
        return self.item + self.item_row * rows + kv_tiles * (self.kv_tile + self.row * rows)


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a family for some head sizes.

    Attributes:
        tile_q_short: folded rows of the query tile for requests that fit into one.
        tile_q: folded rows of the query tile for all others.
        tile_kv: tokens of a KV tile.
        costs: of an item on these tiles.
    """

    tile_q_short: int
    tile_q: int
    tile_kv: int
    costs: Costs


@dataclass(frozen=True)
class Family:
    """A kernel family.

    Attributes:
        name: as ``ATTNLOOM_FAMILY`` names it.
        dtypes: of q and the output, and of the caches.
        tiles: its tile shape.
        wide: its tile shape where head_dim is above 128, or shared memory is little, or in the batch_invariant mode;
            None: the same.
        kv_dtypes: further dtypes of the caches.
        slim_tile_kv: tokens of a KV tile of a cache that :func:`is_slim`; None: as of others.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    tiles: Tiles
    wide: Tiles | None = None
    kv_dtypes: tuple[torch.dtype, ...] = ()
    slim_tile_kv: int | None = None

    def tiles_for(self, head_dim: int, target: str = "", *, slim: bool = False, batch_invariant: bool = False) -> Tiles:
        """The tile shape for a head size, on an architecture as devices.target_of names it.

        Args:
            slim: as :func:`is_slim` says.
            batch_invariant: of the engine's mode.
        """
        wide = head_dim > 128 or has_little_shared(target) or batch_invariant
        tiles = self.wide if wide and self.wide is not None else self.tiles
        if slim and self.slim_tile_kv is not None:
            tiles = replace(tiles, tile_kv=self.slim_tile_kv)
        return tiles


# On a CPU the query tile only bounds the rows: a worker computes those that there are. Costs are nanoseconds of one
# Zen 4 core at head_dim 128 (benchmarks/cpu_attention.py); only their ratios matter.
CPU = Family(
    "cpu",
    (torch.float32, torch.bfloat16, torch.float16),
    Tiles(tile_q_short=96, tile_q=96, tile_kv=64, costs=Costs(item=400, item_row=0, kv_tile=1500, row=250)),
)

# csrc/sm80/shape.h compiles these tiles in. Costs are in 256ths of a KV tile of decode, where reading KV is all that
# takes time; on a tall query tile it takes the tensor cores three times as long beside CTAs that decode. An item takes
# two and a half KV tiles of decode, or two of its own on a tall query tile (benchmarks/NOTES.md).
_SM80_COSTS = Costs(item=640, item_row=8, kv_tile=256, row=4)
SM80 = Family(
    "sm80",
    (torch.bfloat16, torch.float16),
    Tiles(tile_q_short=16, tile_q=128, tile_kv=64, costs=_SM80_COSTS),
    wide=Tiles(tile_q_short=16, tile_q=64, tile_kv=64, costs=_SM80_COSTS),
    kv_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    slim_tile_kv=128,
)


def is_slim(head_dim: int, kv_dtype: torch.dtype, variant: Variant) -> bool:
    """Whether a cache holds 8-bit elements that hooks leave as they are, in rows of at most 128 bytes.

    Twice as many of them make a KV tile then: what a tile costs beside its bytes is spread over more. Blocks of a mask
    are KV tiles, and stay as fine as those of other shapes.
    """
    rewritten = variant.texts("key_transform") or variant.texts("value_transform")
    return kv_dtype.itemsize == 1 and head_dim <= 128 and not rewritten and not variant.texts("logits_mask")


FAMILIES = {family.name: family for family in (CPU, SM80)}

_LEAST_CAPABILITY = (8, 0)


def family_for(device: torch.device) -> Family:
    """The family that serves a device.

    Raises:
        ValueError: no family does, or ``ATTNLOOM_FAMILY`` names one that does not.
    """
    if device.type == "cpu":
        family = CPU
    elif device.type == "cuda":
        device = indexed(device)
        found = capability(device)
        if found < _LEAST_CAPABILITY:
            raise ValueError(
                f"device={device}: expected compute capability 8.0 (Ampere) or newer, "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
            )
        family = SM80
    else:
        raise ValueError(f"device={device}: expected cpu or cuda, the devices of the kernel families built so far")
    forced = settings().family
    if forced is not None and forced != family.name:
        raise ValueError(f"ATTNLOOM_FAMILY={forced!r}: expected {family.name} for device={device}")
    return family

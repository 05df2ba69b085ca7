"""Which kernel family and which tiles serve a shape: the one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.core.settings import settings

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_GROUP = 128


@dataclass(frozen=True)
class Costs:
    """What an item costs, in integer units of one family: ``item + kv_tiles * (kv_tile + row * rows)``.

    Attributes:
        item: loading Q, writing the row or a partial state; at least 1.
        kv_tile: reading one KV tile.
        row: computing one folded row on one KV tile.
    """

    item: int
    kv_tile: int
    row: int


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a family.

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
        dtypes: of q, the caches and the output.
        tiles: its tile shape.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    tiles: Tiles


# On a CPU the query tile only bounds the rows: a worker computes those that there are. Costs are nanoseconds of one
# Zen 4 core at head_dim 128 (benchmarks/cpu_attention.py); only their ratios matter.
CPU = Family(
    "cpu",
    (torch.float32, torch.bfloat16, torch.float16),
    Tiles(tile_q_short=96, tile_q=96, tile_kv=64, costs=Costs(item=400, kv_tile=1500, row=250)),
)


def family_for(device: torch.device) -> Family:
    """The family that serves a device.

    Raises:
        ValueError: no family does, or ``ATTNLOOM_FAMILY`` names one that does not.
    """
    if device.type != "cpu":
        raise ValueError(f"device={device}: expected cpu, the device of the kernel families built so far")
    forced = settings().family
    if forced is not None and forced != CPU.name:
        raise ValueError(f"ATTNLOOM_FAMILY={forced!r}: expected cpu for device={device}")
    return CPU

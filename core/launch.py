"""The launch: tensors to a kernel's params struct. On a GPU core/direct.py launches attention itself."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core.abi import (
    AttentionParams,
    BlockMaskParams,
    BlockMaskTensor,
    CacheTensor,
    FinishParams,
    LayoutTensors,
    PlanHeader,
    QueryTensor,
)
from attnloom.core.arena import arena, floats, floats_of_chunks
from attnloom.core.block_mask import BlockMask
from attnloom.core.errors import AttnloomError
from attnloom.core.host import host_module
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.streams import on, stream_of

if TYPE_CHECKING:
    from attnloom.core.attention import Attention

runs = [0]
"""Launches of attention kernels; a list, since to add to it takes less than to call a function that counts."""


def run_count() -> int:
    """Launches in this process so far: what proves that a served token came from here."""
    return runs[0]


def layout_tensors(layout: BlockSparseLayout) -> LayoutTensors:
    """The struct of a layout."""
    positions = layout.positions
    return LayoutTensors(
        layout.starts.data_ptr(),
        layout.lengths.data_ptr(),
        layout.indices.data_ptr(),
        None if positions is None else positions.data_ptr(),
        layout.block_size,
        layout.index_stride,
    )


def check_indices(layout: BlockSparseLayout, num_blocks: int) -> None:
    """Every block id that the layout uses lies in a cache of ``num_blocks`` blocks.

    Raises:
        ValueError: one does not; the message names the row and the block.
    """
    if layout.device.type != "cpu":
        layout = layout.to("cpu")
    found = (ctypes.c_int64 * 3)()
    struct = layout_tensors(layout)
    if host_module().attnloom_find_bad_index(
        ctypes.byref(struct), layout.num_rows, layout.indices.shape[0], num_blocks, found
    ):
        row, block, index = found
        if block < 0:
            raise ValueError(
                f"layout.lengths[{row}]={index}: expected 0 to what the {layout.indices.shape[0]} indices hold "
                f"from starts[{row}]={int(layout.starts[row])} on"
            )
        raise ValueError(
            f"layout.indices: block {block} of row {row} is {index}: expected 0 to {num_blocks - 1}, the cache's blocks"
        )


def rows_tensor(tensor: Tensor) -> QueryTensor:
    """The struct of a ``[rows, heads, dim]`` tensor."""
    return QueryTensor(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def cache_tensor(tensor: Tensor) -> CacheTensor:
    """The struct of a cache, as a CPU reads it."""
    return CacheTensor(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _floats_of(engine: Attention, num_workers: int, plan_buffer: Tensor) -> int:
    """Room that a launch needs for partial states."""
    tile_q, head_dim_v = engine.tiles.tile_q, engine.head_dim_v
    if not engine.batch_invariant:
        return floats(num_workers, tile_q, head_dim_v)
    return floats_of_chunks(
        num_workers, tile_q, head_dim_v, PlanHeader.from_address(plan_buffer.data_ptr()).chunk_states
    )


def run(
    engine: Attention,
    plan_buffer: Tensor,
    num_workers: int,
    layout: BlockSparseLayout,
    block_mask: BlockMask | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    words: ctypes.Array[ctypes.c_uint64],
    scales: tuple[float, float, float],
    unfinished: bool,
) -> None:
    """Run an attention kernel on a CPU, on checked arguments; core/direct.py launches on a GPU.

    Args:
        tensors: q, k_cache, v_cache, out, lse (or None).
        words: the variant's parameters, packed.
        scales: of q . k, of the keys, of the values.
        unfinished: write states instead of finished rows.
    """
    q, k_cache, v_cache, out, lse = tensors
    room = arena.reserve(num_workers, _floats_of(engine, num_workers, plan_buffer))
    params = AttentionParams(
        rows_tensor(q),
        cache_tensor(k_cache),
        cache_tensor(v_cache),
        rows_tensor(out),
        None if lse is None else lse.data_ptr(),
        layout_tensors(layout),
        BlockMaskTensor() if block_mask is None else block_mask.struct(),
        plan_buffer.data_ptr(),
        room.states_at,
        room.arrivals_at,
        ctypes.addressof(words),
        *scales,
        unfinished,
        min(num_workers, torch.get_num_threads()),
        num_workers,
    )
    status = engine.module.attnloom_run(ctypes.byref(params))
    if status != 0:
        raise AttnloomError(f"{engine.spec.name}: the kernel refused the plan (status {status})")
    runs[0] += 1


def finish(
    engine: Attention,
    plan_buffer: Tensor,
    layout: BlockSparseLayout,
    state: tuple[Tensor, Tensor | None],
    out: Tensor,
    lse: Tensor | None,
    words: ctypes.Array[ctypes.c_uint64],
) -> None:
    """Apply the sink and output_transform to merged states; checked arguments."""
    values, state_lse = state
    params = FinishParams(
        values.data_ptr(),
        None if state_lse is None else state_lse.data_ptr(),
        rows_tensor(out),
        None if lse is None else lse.data_ptr(),
        layout_tensors(layout),
        plan_buffer.data_ptr(),
        ctypes.addressof(words),
        torch.get_num_threads(),
        values.shape[0],
        stream_of(engine.device),
    )
    with on(engine.device):
        status = engine.module.attnloom_finish(ctypes.byref(params))
    if status != 0:
        raise AttnloomError(f"{engine.spec.name}: states were not finished (status {status})")


def fill_block_mask(
    engine: Attention,
    kinds: Tensor,
    length: int,
    words: ctypes.Array[ctypes.c_uint64],
    part: tuple[int, int, int] | None = None,
) -> None:
    """Evaluate a variant's logits_mask into the kinds of a block mask; checked arguments.

    Args:
        part: (q_begin, q_end, kv_end): the query blocks [q_begin, q_end) and their key blocks [0, kv_end); None: all.
    """
    requests, q_blocks, kv_blocks = kinds.shape
    params = BlockMaskParams(
        ctypes.addressof(words),
        kinds.data_ptr(),
        requests,
        q_blocks,
        kv_blocks,
        *((0, q_blocks, kv_blocks) if part is None else part),
        engine.num_qo_heads,
        engine.num_kv_heads,
        length,
        torch.get_num_threads(),
        stream_of(engine.device),
    )
    with on(engine.device):
        status = engine.module.attnloom_block_mask(ctypes.byref(params))
    if status != 0:
        raise AttnloomError(f"{engine.spec.name}: the block mask was not evaluated (status {status})")

"""StreamingLLM: the first tokens and a window of the last ones, at positions counted inside the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnloom.core.checks import check_positive
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.variant import Param, Variant


def StreamingLLM(sink_tokens: int, window: int) -> Variant:
    """A query sees the first ``sink_tokens`` keys and the last ``window``, its own included (arXiv 2309.17453).

    With the layout and the parameter of :func:`streaming` what lies between is not read, and positions are counted in
    the cache, as the paper has them: add ``RoPE(...)`` over unrotated keys. With a whole layout and zeros for
    ``window_begin`` it is the same mask at the positions of the text.

    Parameter: ``window_begin`` int32 ``[num_requests]``. Bound parameters: int64 ``sink_tokens``, ``window``.
    """
    check_positive("sink_tokens", sink_tokens)
    check_positive("window", window)
    return Variant(
        "streaming_llm",
        (
            Param("window_begin", torch.int32, ("num_requests",)),
            Param("sink_tokens", torch.int64),
            Param("window", torch.int64),
        ),
        logits_mask=(
            "const bool recent = (q_pos - kv_pos < params.window) & (kv_index >= params.window_begin[request]);\n"
            "return recent | (kv_index < params.sink_tokens);"
        ),
        mask_free="return Range{q_last - int(params.window) + 1, kv_len};",
        right=0,
        captures={"sink_tokens": sink_tokens, "window": window},
    )


def streaming(
    layout: BlockSparseLayout, qo_lens: Sequence[int], sink_tokens: int, window: int
) -> tuple[BlockSparseLayout, dict[str, Tensor]]:
    """The blocks that :func:`StreamingLLM` reads, with positions counted in the cache.

    A row keeps the blocks of its first ``sink_tokens`` tokens and those from the first token that its first query's
    window reaches. The window's tokens take the positions from ``sink_tokens`` on; with more than one query those after
    the first stand further from the sinks. A row from which nothing falls out stays as it is.

    Args:
        layout: whole sequences, without positions.
        qo_lens: queries of each row.
        sink_tokens, window: as in the variant.

    Returns:
        the layout, and the parameter ``window_begin``: the slot of each row where its window's blocks begin.
    """
    if layout.positions is not None:
        raise ValueError("layout.positions: expected None, whole sequences")
    if len(qo_lens) != layout.num_rows:
        raise ValueError(f"qo_lens: expected one per row of layout, {layout.num_rows}, got {len(qo_lens)}")
    size = layout.block_size
    sink_blocks = -(-sink_tokens // size)
    indices: list[Tensor] = []
    positions: list[int] = []
    starts, lengths, begins = [], [], []
    for row, (length, queries) in enumerate(zip(layout.lengths.tolist(), qo_lens, strict=True)):
        blocks = -(-length // size)
        first = max(length - queries - window + 1, 0)  # token that the first query's window begins with
        kept = list(range(blocks))
        at = [block * size for block in kept]
        begin = 0
        if first > sink_tokens:
            recent = range(first // size, blocks)
            kept = [*range(sink_blocks), *recent]
            at = [*(block * size for block in range(sink_blocks)), *(sink_tokens + b * size - first for b in recent)]
            begin = sink_blocks * size
            length = begin + length - recent.start * size
        start, stride = int(layout.starts[row]), layout.index_stride
        starts.append(len(positions))
        indices.append(layout.indices[[start + block * stride for block in kept]])
        positions.extend(at)
        lengths.append(length)
        begins.append(begin)
    device = layout.device
    chosen = BlockSparseLayout(
        size,
        torch.tensor(starts, dtype=torch.int64, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.cat([layout.indices[:0], *indices]),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )
    return chosen, {"window_begin": torch.tensor(begins, dtype=torch.int32, device=device)}

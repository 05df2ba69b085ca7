"""Which keys a query sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attnloom.core.checks import check_positive
from attnloom.core.variant import Param, Variant


def Causal() -> Variant:
    """A query sees the keys up to its own position; the last query is at the last key (Vaswani et al., 2017)."""
    return Variant("causal", right=0)


def Full() -> Variant:
    """Every query sees every key, as in encoders and cross attention."""
    return Variant("full")


def SlidingWindow(window: int, *, symmetric: bool = False) -> Variant:
    """A query sees ``window`` keys, its own included: those before it (Mistral 7B, arXiv 2310.06825).

    ``symmetric``: also ``window - 1`` keys after it, as encoders with local attention have it (ModernBERT).
    """
    check_positive("window", window)
    return Variant("sliding_window", left=window - 1, right=window - 1 if symmetric else 0)


def ChunkedLocal(chunk: int) -> Variant:
    """A query sees the keys of its own chunk up to itself; chunks lie at multiples of ``chunk`` (Llama 4, its local
    layers: ``attention_chunk_size``). Bound parameter: int64 ``chunk_size``, fixed.
    """  # noqa: D205
    if check_positive("chunk", chunk) > 2**30:
        raise ValueError(f"chunk={chunk}: expected at most 2**30, which positions stay below")
    return Variant(
        "chunked_local",
        (Param("chunk_size", torch.int64, above=0, fixed=True),),
        logits_mask="return kv_pos >= q_pos - floor_mod(q_pos, int(params.chunk_size));",
        visible="return Range{max(0, q_first - floor_mod(q_first, int(params.chunk_size))), kv_len};",
        mask_free="return Range{q_last - floor_mod(q_last, int(params.chunk_size)), kv_len};",
        left=chunk - 1,
        right=0,
        captures={"chunk_size": chunk},
    )


def PrefixLM() -> Variant:
    """Every query sees a request's prefix, and the keys up to its own position (T5's prefix LM, arXiv 1910.10683).

    Parameter: ``prefix_lengths`` int32 ``[num_requests]``. It stands instead of Causal, not beside it.
    """
    return Variant(
        "prefix_lm",
        (Param("prefix_lengths", torch.int32, ("num_requests",)),),
        logits_mask="return (kv_pos <= q_pos) | (kv_pos < params.prefix_lengths[request]);",
        visible="return Range{0, max(q_last + 1, params.prefix_lengths[request])};",
        mask_free="return Range{0, max(q_first + 1, params.prefix_lengths[request])};",
    )


def DocumentMask() -> Variant:
    """A query sees its own document of those that are packed into a sequence (arXiv 2107.02027; Llama 3, 2407.21783).

    Parameters, from :func:`documents`: ``document_begin`` and ``document_end`` int32 ``[num_requests, positions]``,
    for each position where its document begins and ends. A position beyond them belongs to no document.
    """
    return Variant(
        "document_mask",
        tuple(Param(name, torch.int32, ("num_requests", None)) for name in ("document_begin", "document_end")),
        logits_mask=(
            "const int begin = params.document_begin.at(request, max(q_pos, 0));\n"
            "const int end = params.document_end.at(request, max(q_pos, 0));\n"
            "return (q_pos >= 0) & (kv_pos >= begin) & (kv_pos < end);"
        ),
        # Past the documents begin and end are 0. The first queries of a tile that reaches there may still be inside.
        visible=(
            "const int end = params.document_end.at(request, max(q_last, 0));\n"
            "return Range{params.document_begin.at(request, max(q_first, 0)), end > 0 ? end : kv_len};"
        ),
        mask_free=(
            "if ((q_first < 0) | (params.document_end.at(request, max(q_last, 0)) < 1)) return Range{0, 0};\n"
            "return Range{params.document_begin.at(request, q_last), params.document_end.at(request, q_first)};"
        ),
    )


def documents(lengths: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The parameters of :func:`DocumentMask`.

    Args:
        lengths: per request the tokens of each of its documents, in their order.
        device: where the result lies.

    Returns:
        ``document_begin`` and ``document_end`` int32 ``[num_requests, largest sum of lengths]``.

    Raises:
        ValueError: a length below 1.
    """
    for request, row in enumerate(lengths):
        if any(length < 1 for length in row):
            raise ValueError(f"lengths[{request}]={list(row)}: expected lengths of at least 1")
    ends = [list(accumulate(row)) for row in lengths]
    widest = max((row[-1] for row in ends if row), default=1)
    begin, end = torch.zeros(2, len(ends), widest, dtype=torch.int32, device=device)
    for request, row in enumerate(ends):
        for first, last in zip([0, *row], row, strict=False):
            begin[request, first:last] = first
            end[request, first:last] = last
    return {"document_begin": begin, "document_end": end}


def PackedMask() -> Variant:
    """A boolean mask per request, one bit per (query, key), as :func:`attnloom.core.masks.pack_masks` packs it.

    Keys before ``mask_begin[request]`` are visible; on the others decides bit
    ``mask_offset + q_index * mask_columns + (kv_index - mask_begin)``.
    """
    return Variant(
        "packed_mask",
        (
            Param("packed_mask", torch.uint8, (None,)),
            Param("mask_offset", torch.int64, ("num_requests",)),
            Param("mask_begin", torch.int32, ("num_requests",)),
            Param("mask_columns", torch.int32, ("num_requests",)),
        ),
        logits_mask=(
            "const int column = kv_index - params.mask_begin[request];\n"
            "if (column < 0) return true;\n"
            "return packed_bit(params.packed_mask, params.mask_offset[request]"
            " + int64_t(q_index) * params.mask_columns[request] + column);"
        ),
    )

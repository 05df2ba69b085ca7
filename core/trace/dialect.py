"""The dialect's names: what each hook is given, and the ranges of the indices."""

from __future__ import annotations

import torch

from attnloom.core.trace.graph import Graph, Node

ELEMENT = {
    "query_transform": "query",
    "key_transform": "key",
    "value_transform": "value",
    "logits_transform": "logits",
    "output_transform": "output",
}
"""The value that a hook transforms."""

_PAIR = ("request", "q_pos", "kv_pos", "q_head", "kv_head", "q_index", "kv_index")
_QUERY = ("request", "q_pos", "q_head", "kv_head", "q_index")
_KEY = ("request", "kv_pos", "kv_head", "kv_index")
INDICES = {
    "query_transform": ("dim", *_QUERY),
    "key_transform": ("dim", *_KEY),
    "value_transform": ("dim", *_KEY),
    "logits_transform": _PAIR,
    "logits_mask": _PAIR,
    "output_transform": ("dim", *_QUERY),
    "sink": _QUERY,
}
"""The integers that it sees."""

SIZES = ("head_dim", "head_dim_v")
"""Constants of the kernel that every hook sees."""

RESULT = {hook: torch.bool if hook == "logits_mask" else torch.float32 for hook in INDICES}
"""What a hook returns."""

FLEX = {
    "logits_transform": {"logits": "score", "request": "b", "q_head": "h", "q_pos": "q_idx", "kv_pos": "kv_idx"},
    "logits_mask": {"request": "b", "q_head": "h", "q_pos": "q_idx", "kv_pos": "kv_idx"},
}
"""FlexAttention's arguments in their order: name of the dialect -> name in torch's documentation."""

_LARGEST = 2**30 - 1
_RANGES = {
    "q_pos": (-_LARGEST, _LARGEST),  # below 0 where a request has more queries than keys
    "kv_pos": (0, _LARGEST),
    "q_index": (0, _LARGEST),
    "kv_index": (0, _LARGEST),
    "request": (0, 2**24 - 1),
    "q_head": (0, 2**16 - 1),
    "kv_head": (0, 2**16 - 1),
    "dim": (0, 1023),
    "head_dim": (1, 1024),
    "head_dim_v": (1, 1024),
}


def names_of(hook: str) -> tuple[str, ...]:
    """What a function for ``hook`` may take, by name."""
    value = (ELEMENT[hook],) if hook in ELEMENT else ()
    return (*value, *INDICES[hook], *SIZES, "params")


def index_leaf(g: Graph, name: str) -> Node:
    """An index as a traced value: int64 for torch, as FlexAttention's indices are, within its range."""
    low, high = _RANGES[name]
    return g.leaf(name, torch.int64, low, high)

"""Who is measured beside ours, by the names that the result file uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpu import flashinfer_peers, vllm_peers
from gpu.case import Case, Runner

DISTRIBUTIONS = ("vllm", "flashinfer-python", "triton")


@dataclass(frozen=True)
class Peer:
    """How a peer is planned for a case, and the module whose import tells whether it is installed."""

    module: str
    prepare: Callable[[Case], Runner]


PEERS = {
    "FI fa2": Peer("flashinfer", flashinfer_peers.fa2),
    "FI fa3": Peer("flashinfer", flashinfer_peers.fa3),
    "FI persistent": Peer("flashinfer", flashinfer_peers.persistent),
    "FI decode": Peer("flashinfer", flashinfer_peers.decode),
    "FA3": Peer("vllm.vllm_flash_attn", vllm_peers.flash_attention_3),
    "Triton": Peer("vllm.v1.attention.ops.triton_unified_attention", vllm_peers.triton),
}
CORE = ("FI fa2", "FI persistent", "FA3")


def missing(names: Iterable[str]) -> dict[str, str]:
    """Peers that cannot be imported, and why."""
    reasons: dict[str, str] = {}
    for module in dict.fromkeys(PEERS[name].module for name in names):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library built for another torch fails in ways of its own
            reasons |= {name: first_line(error) for name in names if PEERS[name].module == module}
    return reasons


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    if type(error).__name__ == "MissingJITCacheError":
        return "not built ahead: gpu/prebuild.py builds it, --jit lets it be compiled in the run"
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]

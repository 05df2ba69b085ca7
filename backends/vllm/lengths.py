"""The lengths of a step as the host knows them: what a plan is made from."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def host_query_indptr(common: Any) -> Tensor:
    """int32 [requests + 1] on the host: where each request's queries begin.

    Args:
        common: vLLM's CommonAttentionMetadata. On a CPU the device tensor is the truth and lies on the host already;
            elsewhere the host copy is used, and only where a drafter gives none the device is waited for.
    """
    indptr: Tensor = common.query_start_loc
    if indptr.device.type != "cpu":
        indptr = common.query_start_loc.cpu() if common.query_start_loc_cpu is None else common.query_start_loc_cpu
    return indptr[: common.num_reqs + 1]


def host_kv_lengths(common: Any) -> Tensor:
    """int32 [requests] on the host: for each request its KV length, or an upper bound of it.

    Without any host copy (`seq_lens_cpu_upper_bound` may be None) every request may be as long as the longest one,
    whose length the host always knows: a plan is right for any true length up to the planned one.
    """
    lengths: Tensor = common.seq_lens
    if lengths.device.type != "cpu":
        if common.seq_lens_cpu_upper_bound is None:
            return lengths.new_full((common.num_reqs,), common.max_seq_len, device="cpu")
        lengths = common.seq_lens_cpu_upper_bound
    return lengths[: common.num_reqs]

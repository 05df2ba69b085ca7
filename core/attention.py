"""The engine: init compiles or loads a kernel, plan makes a step's plan, run computes a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from attnloom.core.arena import floats_on_gpu, reserve_now
from attnloom.core.block_mask import BlockMask
from attnloom.core.devices import indexed, target_of, workers_of
from attnloom.core.direct import DirectPath
from attnloom.core.engine_masks import EngineMasks
from attnloom.core.engine_params import EngineParams
from attnloom.core.engine_plan import plan_for
from attnloom.core.engine_run import finish, run_checked, run_direct
from attnloom.core.engine_shape import check_dtypes, check_head_dims, check_heads
from attnloom.core.kernels import attention_module, attention_spec, ctas_per_sm
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.op import register_engine
from attnloom.core.params import Value
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.position_mask import PositionMask
from attnloom.core.settings import asked_workers, validating
from attnloom.core.templates import NO_HOOKS
from attnloom.core.tiles import CHUNK_TOKENS, family_for, is_slim
from attnloom.core.variant import Variant
from attnloom.core.variants import Causal


class Attention:
    """Attention of one shape and variant on one device.

    Args:
        num_qo_heads: query heads, a multiple of num_kv_heads, at most 128 times as many.
        num_kv_heads: KV heads.
        head_dim: of q and k: 64, 80, 96, 112, 128, 192 or 256.
        head_dim_v: of v and the output; None: head_dim.
        dtype: of q, the caches and the output: bfloat16 or float16, float32 on a CPU only. Accumulation is float32.
        kv_dtype: of the caches; None: dtype. On a GPU also float8_e4m3fn and float8_e5m2.
        variant: what is computed.
        device: where.
        batch_invariant: a request's rows have the same bits alone and in any batch, on any number of workers, and
            whether its queries come at once, in parts or one by one on a cached prefix. KV is cut at fixed chunks of
            2048 tokens, so long requests balance less evenly, and short query tiles take the code of long ones. On a
            GPU it takes up to 225 MB for partial states, once for all engines of a stream and once a graph pool. Holds
            for hooks of positions, not of ``request``, ``q_index`` or ``kv_index``; for lengths up to the planned ones;
            for finite keys and values.

    Raises:
        TypeError, ValueError: a shape, dtype or device that is not supported; the message says what is.
        JitError: the kernel could not be built or loaded.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        variant: Variant | None = None,
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
    ) -> None:
        check_heads(num_qo_heads, num_kv_heads)
        check_head_dims(head_dim, head_dim_v)
        family = family_for(torch.device(device))
        self.device = indexed(torch.device(device))
        check_dtypes(family, self.device, dtype, kv_dtype)
        self.variant = Causal() if variant is None else variant
        if not isinstance(self.variant, Variant):
            raise TypeError(f"variant={variant!r}: expected a Variant")
        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = self.head_dim_v = head_dim
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.batch_invariant = batch_invariant
        target = target_of(self.device)
        slim = is_slim(head_dim, self.kv_dtype, self.variant)
        self.tiles = family.tiles_for(head_dim, target, slim=slim, batch_invariant=batch_invariant)
        sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": self.head_dim_v,
        }
        self.params = EngineParams(self.variant, sizes, self.device)
        self.spec = attention_spec(
            family.name, dtype, head_dim, self.head_dim_v, self.variant, target, self.kv_dtype, batch_invariant
        )
        self.module = attention_module(self.spec)
        self.plan_key = PlanKey(
            num_qo_heads,
            num_kv_heads,
            self.tiles.tile_q_short,
            self.tiles.tile_q,
            self.tiles.tile_kv,
            self.variant.left,
            self.variant.right,
            self.device,
            self.spec.name if self.variant.visible else "",
            CHUNK_TOKENS // self.tiles.tile_kv if batch_invariant else 0,
        )
        self.validate = validating()
        self._plain = not (self.variant.params or self.validate)  # nothing to pack, nothing to look at
        self._masks = EngineMasks()
        self.direct: DirectPath | None = None
        if self.device.type == "cuda":
            self._prepare_device()
        self.handle = register_engine(self)

    def _prepare_device(self) -> None:
        """All that may not happen inside a capture: kernels are brought onto the GPU, the arena is allocated."""
        self._ctas_per_sm = ctas_per_sm(self.module, self.spec.name, self.device, self.tiles, self.head_dim)
        heads = (self.num_qo_heads, self.num_kv_heads)
        self.direct = DirectPath(self.spec.name, self.module, self.device, self.head_dim_v, heads, self.batch_invariant)
        workers = {tile_q: self.workers(tile_q) for tile_q in self._ctas_per_sm}
        room = max(
            floats_on_gpu(count, tile_q, self.head_dim_v, self.batch_invariant) for tile_q, count in workers.items()
        )
        reserve_now(self.device, room, max(workers.values()))

    def workers(self, tile_q: int | None = None) -> int:
        """Workers of a plan that asks for none in particular: torch's threads, or the CTAs that a GPU holds.

        Args:
            tile_q: folded rows of the plan's largest query tile; None: of any plan. CTAs of short tiles need less.
        """
        if (asked := asked_workers()) is not None:
            return asked
        if self.device.type != "cuda":
            return torch.get_num_threads()
        return workers_of(self.device, self._ctas_per_sm[tile_q or self.tiles.tile_q], self.num_kv_heads)

    def __repr__(self) -> str:
        return (
            f"Attention({self.num_qo_heads}, {self.num_kv_heads}, {self.head_dim}, dtype={self.dtype}, "
            f"variant={self.variant.name}, device={self.device}{', batch_invariant=True' * self.batch_invariant})"
        )

    def plan(
        self,
        qo_indptr: Tensor,
        layout: BlockSparseLayout,
        *,
        kv_lens: Tensor | None = None,
        num_workers: int | None = None,
        params: Mapping[str, Value] | None = None,
        block_mask: BlockMask | None = None,
        total_q: int | None = None,
        max_q: int | None = None,
        into: Plan | None = None,
    ) -> Plan:
        """Plan a step; every engine with the same ``plan_key`` may run it.

        On a GPU, offsets on the host give a plan made by the host and copied: the lengths to plan for must be on the
        host as well. Offsets on the device give a plan made by the device: the lengths are read when the stream gets
        there, and anew at each replay of a CUDA graph. Neither waits for the device.

        Args:
            qo_indptr: int32 ``[num_requests + 1]``, from 0, on the host or on the engine's device.
            layout: where the KV of each request lies.
            kv_lens: int32 ``[num_requests]``, where qo_indptr is: lengths to plan for, upper bounds of
                ``layout.lengths``. None: ``layout.lengths``.
            num_workers: None: ``ATTNLOOM_WORKERS``, or torch's threads, or as many CTAs as the GPU holds.
            params: the variant's parameters, where it declares a visible range: the plan then serves layers with the
                same ones.
            block_mask: KV tiles to skip, and tiles in which logits_mask need not be evaluated; see :meth:`block_mask`.
            total_q: with qo_indptr on the device, at least its last entry: what the plan has room for, and the rows
                that :meth:`run` expects. A step with more queries computes nothing.
            max_q: with qo_indptr on the device, the most queries of a request, if the host knows it: where they are
                few, decode and drafts, the plan is for a kernel that does only such, faster. None: 1 where total_q is
                at most the requests. A request that has more is slower. Not needed with qo_indptr on the host.
            into: a plan with the same key, requests and workers and room for as many queries. The new one takes its
                buffer, at the same address: what a captured graph reads is the new plan. The old one is gone.

        Raises:
            TypeError, ValueError: an argument of another type, shape, device or value; the message names it.
        """
        return plan_for(
            self,
            qo_indptr,
            layout,
            kv_lens=kv_lens,
            num_workers=num_workers,
            params=params,
            block_mask=block_mask,
            total_q=total_q,
            max_q=max_q,
            into=into,
        )

    def block_mask(self, length: int, *, num_requests: int = 1, params: Mapping[str, Value] | None = None) -> BlockMask:
        """Evaluate the variant's logits_mask at every position below ``length`` and keep what each block needs.

        Computed once for the same arguments; parameters that change their content afterwards need a new engine.

        Args:
            length: positions to cover, rounded up to a power of two and to a whole block.
            num_requests: 1: one mask for all requests; more, where the mask depends on the request.
            params: the variant's parameters.

        Raises:
            ValueError: the variant has no mask, or one over indices inside a request instead of positions.
        """
        return self._masks.get(self, length, num_requests, params)

    def position_mask(self, length: int, *, params: Mapping[str, Value] | None = None) -> PositionMask:
        """The block mask that a server keeps for a causal variant whose mask is over positions: see PositionMask.

        Args:
            length: positions that may ever be needed.
            params: the variant's parameters.

        Raises:
            ValueError: the mask is over something that changes from step to step, or the variant is not causal.
        """
        return PositionMask(self, length, self.params.values(params, 1))

    @overload
    def run(
        self,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        sm_scale: float | None = ...,
        k_scale: float | None = ...,
        v_scale: float | None = ...,
        params: Mapping[str, Value] | None = ...,
        out: Tensor | None = ...,
        return_lse: Literal[False] = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def run(
        self,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        sm_scale: float | None = ...,
        k_scale: float | None = ...,
        v_scale: float | None = ...,
        params: Mapping[str, Value] | None = ...,
        out: Tensor | None = ...,
        return_lse: Literal[True],
        return_state: Literal[False] = ...,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def run(
        self,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        sm_scale: float | None = ...,
        k_scale: float | None = ...,
        v_scale: float | None = ...,
        params: Mapping[str, Value] | None = ...,
        out: Tensor | None = ...,
        return_lse: bool = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, Tensor | None]: ...

    def run(
        self,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        sm_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        params: Mapping[str, Value] | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Compute one layer.

        Args:
            plan: of this step.
            q: ``[>= total_q, num_qo_heads, head_dim]``, any strides, last dimension contiguous; on a GPU base and
                strides are multiples of 16 bytes.
            k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, any strides that are multiples of 16
                bytes, last dimension contiguous; views of larger buffers will do. On a GPU strides are below 2 GiB.
            sm_scale: factor of q . k, default ``head_dim ** -0.5``.
            k_scale, v_scale: factors of the caches, default 1.
            params: the variant's parameters by name.
            out: ``[>= total_q, num_qo_heads, head_dim_v]``, dtype as q (float32 with ``return_state``), last dimension
                contiguous; None: a new one of total_q rows. Rows from total_q on are not touched. On a GPU base and
                strides are multiples of 8 bytes, with ``return_state`` of 16.
            return_lse: also return the LSE of the finished rows, a sink counted.
            return_state: return the unfinished state instead, before sinks and output_transform: what
                :func:`attnloom.merge_states` and :func:`attnloom.finish_state` take.

        Returns:
            out; or (out, lse) with ``return_lse``; or (out float32, lse) with ``return_state``, where lse is None for a
            variant without softmax. lse is float32 ``[total_q, num_qo_heads]``, natural logarithm; -inf, with out 0,
            for a query that sees no key.
        """
        scales, flags = (sm_scale, k_scale, v_scale), (return_lse, return_state)
        if self.direct is not None and not torch.compiler.is_compiling():
            if out is None or params is not None or not self._plain or return_lse or return_state:
                return run_direct(self, self.direct, plan, q, k_cache, v_cache, scales, params, out, flags)
            self.direct.run(self, plan, q, k_cache, v_cache, scales, flags, out, None, NO_HOOKS)
            return out
        return run_checked(self, plan, q, k_cache, v_cache, scales, params, out, flags)

    def finish(
        self,
        plan: Plan,
        out_state: Tensor,
        lse_state: Tensor | None,
        *,
        params: Mapping[str, Value] | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`attnloom.finish_state`."""
        return finish(self, plan, out_state, lse_state, params, out, return_lse)

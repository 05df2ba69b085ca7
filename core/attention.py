"""The engine: init compiles or loads a kernel, plan makes a step's plan, run computes a layer."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from attnloom.core import launch
from attnloom.core.arena import floats, reserve_now
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_aligned, check_contiguous_last, check_positive, check_scale, check_tensor
from attnloom.core.device_module import device_module
from attnloom.core.device_plan import plan_step
from attnloom.core.device_planner import DeviceRange, check_same_room
from attnloom.core.devices import indexed, target_of, workers_of
from attnloom.core.direct import DirectPath
from attnloom.core.errors import LoadFailed
from attnloom.core.hook_text import code_of
from attnloom.core.kernels import attention_module, attention_spec
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.op import attention_op, register_engine
from attnloom.core.packed import PackedParams
from attnloom.core.params import Value, check_captures, ordered, pack, spare_word
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.planner import DeclaredRange, bound_of_longest, longest, plan_scan
from attnloom.core.position_mask import PositionMask
from attnloom.core.settings import asked_workers, validating
from attnloom.core.streams import capturing
from attnloom.core.templates import NO_HOOKS
from attnloom.core.tiles import CHUNK_TOKENS, HEAD_DIMS, MAX_GROUP, family_for
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
            2048 tokens, so long requests balance less evenly, and short query tiles take the code of long ones. Holds
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
        check_positive("num_qo_heads", num_qo_heads)
        check_positive("num_kv_heads", num_kv_heads)
        if num_qo_heads % num_kv_heads or num_qo_heads // num_kv_heads > MAX_GROUP:
            raise ValueError(
                f"num_qo_heads={num_qo_heads}: expected a multiple of num_kv_heads={num_kv_heads}, "
                f"at most {MAX_GROUP} times"
            )
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={head_dim}: expected one of {HEAD_DIMS}")
        if head_dim_v not in (None, head_dim):
            raise ValueError(f"head_dim_v={head_dim_v}: expected head_dim, {head_dim}")
        family = family_for(torch.device(device))
        self.device = indexed(torch.device(device))
        if dtype not in family.dtypes:
            raise ValueError(f"dtype={dtype}: expected one of {family.dtypes} on {self.device}")
        if kv_dtype not in (None, dtype, *family.kv_dtypes):
            others = f" or one of {family.kv_dtypes}" if family.kv_dtypes else ""
            raise ValueError(f"kv_dtype={kv_dtype}: expected dtype, {dtype},{others} on {self.device}")
        if batch_invariant and self.device.type != "cpu":
            raise ValueError(
                f"batch_invariant=True: expected False on {self.device}, only a CPU's kernels have the mode"
            )
        self.variant = Causal() if variant is None else variant
        if not isinstance(self.variant, Variant):
            raise TypeError(f"variant={variant!r}: expected a Variant")
        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.tiles = family.tiles_for(head_dim, target_of(self.device))
        self.batch_invariant = batch_invariant
        self._sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": self.head_dim_v,
        }
        check_captures(self.variant.params, self.variant.captures, self._sizes)
        self.spec = attention_spec(
            family.name,
            dtype,
            head_dim,
            self.head_dim_v,
            self.variant,
            target_of(self.device),
            self.kv_dtype,
            batch_invariant,
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
        # What a variant brings along may lie on the host; it is copied once, when the engine is made.
        self._captures = {
            name: value.to(self.device) if isinstance(value, Tensor) and self.device.type == "cuda" else value
            for name, value in self.variant.captures.items()
        }
        self._block_masks: dict[tuple[object, ...], tuple[BlockMask, list[Value]]] = {}
        self._validate = validating()
        self._plain = not (self.variant.params or self._validate)  # nothing to pack, nothing to look at
        self._packed = PackedParams()
        self.direct: DirectPath | None = None
        if self.device.type == "cuda":
            self._prepare_device()
        self.handle = register_engine(self)

    def _prepare_device(self) -> None:
        """All that may not happen inside a capture: kernels are brought onto the GPU, the arena is allocated."""
        device_module(self.device)
        spare_word(self.device)
        with torch.cuda.device(self.device):
            error = self.module.attnloom_prepare()
            if error:
                raise LoadFailed(f"{self.spec.name}: its kernel cannot run on {self.device}: CUDA error {error}")
            self._ctas_per_sm = {
                tile_q: int(self.module.attnloom_ctas_per_sm(tile_q))
                for tile_q in (self.tiles.tile_q_short, self.tiles.tile_q)
            }
        if 0 in self._ctas_per_sm.values():
            raise LoadFailed(
                f"{self.spec.name}: its kernel cannot run on {self.device}: expected a GPU with more shared memory for "
                f"head_dim={self.head_dim}, {torch.cuda.get_device_name(self.device)} has too little for one CTA"
            )
        group = self.num_qo_heads // self.num_kv_heads
        self.direct = DirectPath(self.spec.name, self.module, self.device, self.head_dim_v, group)
        workers = {tile_q: self.workers(tile_q) for tile_q in self._ctas_per_sm}
        room = max(floats(count, tile_q, self.head_dim_v) for tile_q, count in workers.items())
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
        if not isinstance(layout, BlockSparseLayout):
            raise TypeError(f"layout: expected a BlockSparseLayout, got {type(layout).__name__}")
        if layout.device != self.device:
            raise ValueError(f"layout.device={layout.device}: expected {self.device}")
        check_tensor("qo_indptr", qo_indptr, dtype=torch.int32, ndim=1)
        on_device = qo_indptr.device.type != "cpu"
        lengths = layout.lengths
        if kv_lens is not None:
            lengths = check_tensor("kv_lens", kv_lens, dtype=torch.int32, ndim=1)
        elif not on_device and self.device.type != "cpu":
            raise ValueError(
                f"kv_lens=None: expected lengths on the host, as qo_indptr, since layout.lengths is on {self.device}"
            )
        if lengths.shape != layout.lengths.shape:
            raise ValueError(
                f"kv_lens.shape={tuple(lengths.shape)}: expected one per row of layout, {tuple(layout.lengths.shape)}"
            )
        if on_device != (total_q is not None):
            raise ValueError(
                f"total_q={total_q}: expected a bound of qo_indptr[-1] where qo_indptr is on a GPU, else None; "
                f"qo_indptr.device={qo_indptr.device}"
            )
        if block_mask is not None and not self.variant.logits_mask:
            raise ValueError(
                f"block_mask: expected None for {self.variant.name}, which has no logits_mask to skip by it"
            )
        if self.device.type == "cuda":
            key = self._key_with(block_mask)
            if isinstance(into, Plan):
                short = into.key.tile_q == key.tile_q_short  # a captured graph launches the same kernel again
            else:
                most = longest(qo_indptr) if total_q is None else bound_of_longest(qo_indptr, total_q, max_q)
                short = most * self.num_qo_heads <= key.tile_q_short * self.num_kv_heads
            if short:
                key = key._replace(tile_q=key.tile_q_short)
            if num_workers is None:
                num_workers = self.workers(key.tile_q)
            values = self._values(params, layout.num_rows) if self.variant.visible else None
            return plan_step(
                qo_indptr,
                lengths,
                key,
                total_q=total_q,
                num_workers=num_workers,
                lockstep=math.gcd(self.num_kv_heads, num_workers),
                costs=self.tiles.costs,
                layout=layout,
                ranges=None if values is None else DeviceRange(self.module, pack(self.variant.params, values)),
                block_mask=block_mask,
                into=into,
                validate=self._validate,
            )
        if num_workers is None:
            num_workers = self.workers()
        ranges, values = None, None
        if self.variant.visible:
            values = self._values(params, layout.num_rows)  # kept alive while the planner reads them
            address = ctypes.cast(self.module.attnloom_visible, ctypes.c_void_p).value
            assert address is not None
            ranges = DeclaredRange(address, pack(self.variant.params, values))
        plan = plan_scan(
            qo_indptr,
            lengths,
            self._key_with(block_mask),
            num_workers=num_workers,
            costs=self.tiles.costs,
            layout=layout,
            ranges=ranges,
            block_mask=block_mask,
            tile_capacity=None if into is None else into.tile_capacity,
        )
        if into is None:
            return plan
        check_same_room(into, plan.key, plan.num_requests, plan.tile_capacity, num_workers, plan.lockstep)
        return replace(plan, buffer=into.buffer.copy_(plan.buffer))

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
        check_positive("length", length)
        check_positive("num_requests", num_requests)
        if not self.variant.logits_mask:
            raise ValueError(f"block_mask: expected a variant with a logits_mask, {self.variant.name} has none")
        if any(re.search(r"\b[qk]v?_index\b", code_of(text)) for text in self.variant.texts("logits_mask")):
            raise ValueError(f"block_mask: the mask of {self.variant.name} is over q_index and kv_index, not positions")
        values = self._values(params, num_requests)
        length = 1 << (max(length, self.tiles.tile_kv) - 1).bit_length()
        key = (length, num_requests, *(id(value) if isinstance(value, Tensor) else value for value in values))
        if key not in self._block_masks:
            blocks = -(-length // self.tiles.tile_kv)
            kinds = torch.empty(num_requests, blocks, blocks, dtype=torch.uint8, device=self.device)
            launch.fill_block_mask(self, kinds, length, pack(self.variant.params, values))
            # The values stay with the mask, so that the ids in the key stay theirs.
            self._block_masks[key] = (BlockMask(kinds, self.tiles.tile_kv), values)
        return self._block_masks[key][0]

    def position_mask(self, length: int, *, params: Mapping[str, Value] | None = None) -> PositionMask:
        """The block mask that a server keeps for a causal variant whose mask is over positions: see PositionMask.

        Args:
            length: positions that may ever be needed.
            params: the variant's parameters.

        Raises:
            ValueError: the mask is over something that changes from step to step, or the variant is not causal.
        """
        return PositionMask(self, length, self._values(params, 1))

    def _values(self, params: Mapping[str, Value] | None, num_requests: int) -> list[Value]:
        sizes = {**self._sizes, "num_requests": num_requests}
        return ordered(self.variant.params, self._captures, params, sizes, self.device)

    def _values_and_words(
        self, params: Mapping[str, Value] | None, num_requests: int
    ) -> tuple[list[Value], ctypes.Array[ctypes.c_uint64]]:
        values = self._values(params, num_requests)
        return values, pack(self.variant.params, values)

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
        if self.direct is not None and not torch.compiler.is_compiling():
            scales, flags = (sm_scale, k_scale, v_scale), (return_lse, return_state)
            if out is None or params is not None or not self._plain or return_lse or return_state:
                return self._run_direct(self.direct, plan, q, k_cache, v_cache, scales, params, out, flags)
            self.direct.run(self, plan, q, k_cache, v_cache, scales, flags, out, False, None, NO_HOOKS)
            return out
        self.check_plan(plan)
        layout = plan.layout
        if layout is None:
            raise ValueError("plan.layout=None: expected a plan made with a layout")
        self._check_rows("q", q, self.dtype, self.head_dim, plan)
        num_blocks = min(self._check_cache("k_cache", k_cache, layout), self._check_cache("v_cache", v_cache, layout))
        values = self._values(params, plan.num_requests)
        if return_lse and not self.variant.use_softmax:
            raise ValueError(f"return_lse=True: expected False, {self.variant.name} uses no softmax and has no LSE")
        out_dtype = torch.float32 if return_state else self.dtype
        if out is None:
            out = q.new_empty((plan.total_q, self.num_qo_heads, self.head_dim_v), dtype=out_dtype)
        else:
            self._check_rows("out", out, out_dtype, self.head_dim_v, plan)
        lse = None
        if (return_lse or return_state) and self.variant.use_softmax:
            lse = q.new_empty((plan.total_q, self.num_qo_heads), dtype=torch.float32)
        launch_ = attention_op if torch.compiler.is_compiling() else self._launch
        launch_(
            self,
            plan,
            layout,
            num_blocks,
            (q, k_cache, v_cache, out, lse),
            values,
            self.scales(sm_scale, k_scale, v_scale),
            return_state,
        )
        if return_state:
            return out, lse
        return (out, lse) if lse is not None else out

    def scales(self, sm_scale: object, k_scale: object, v_scale: object) -> tuple[float, float, float]:
        """Checked, with the defaults of :meth:`run`."""
        return (
            self.head_dim**-0.5 if sm_scale is None else check_scale("sm_scale", sm_scale),
            1.0 if k_scale is None else check_scale("k_scale", k_scale),
            1.0 if v_scale is None else check_scale("v_scale", v_scale),
        )

    def _run_direct(
        self,
        direct: DirectPath,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scales: tuple[object, object, object],
        params: Mapping[str, Value] | None,
        out: Tensor | None,
        flags: tuple[bool, bool],
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """:meth:`run` on a GPU: arguments that were checked before are not checked again."""
        self.check_plan(plan)
        if self._validate:
            self.check_run(plan, q, k_cache, v_cache, scales, out, flags)
        return_lse, return_state = flags
        hooks = NO_HOOKS
        if params is not None or self.variant.params:
            words = self._packed.get(
                params, plan.num_requests, lambda: self._values_and_words(params, plan.num_requests)
            )
            hooks = ctypes.addressof(words)
        fresh = out is None
        if out is None:
            check_tensor("q", q)
            dtype = torch.float32 if return_state else self.dtype
            out = q.new_empty((plan.total_q, self.num_qo_heads, self.head_dim_v), dtype=dtype)
        lse = None
        if (return_lse or return_state) and self.variant.use_softmax:
            lse = out.new_empty((plan.total_q, self.num_qo_heads), dtype=torch.float32)
        direct.run(self, plan, q, k_cache, v_cache, scales, flags, out, fresh, lse, hooks)
        if return_state:
            return out, lse
        return out if lse is None else (out, lse)

    def check_run(
        self,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scales: tuple[object, object, object],
        out: Tensor | None,
        flags: tuple[bool, bool],
    ) -> None:
        """All checks of :meth:`run` that do not depend on values on the device, and those that do if asked for."""
        self.check_plan(plan)
        layout = plan.layout
        if layout is None:
            raise ValueError("plan.layout=None: expected a plan made with a layout")
        self._check_rows("q", q, self.dtype, self.head_dim, plan)
        num_blocks = min(self._check_cache("k_cache", k_cache, layout), self._check_cache("v_cache", v_cache, layout))
        for name, scale in zip(("sm_scale", "k_scale", "v_scale"), scales, strict=True):
            if isinstance(scale, Tensor) and scale.is_cuda:
                raise ValueError(f"{name}.device={scale.device}: expected a number, or a tensor on the host")
        self.scales(*scales)
        return_lse, return_state = flags
        if return_lse and not self.variant.use_softmax:
            raise ValueError(f"return_lse=True: expected False, {self.variant.name} uses no softmax and has no LSE")
        if out is not None:
            self._check_rows("out", out, torch.float32 if return_state else self.dtype, self.head_dim_v, plan)
        if self._validate and not capturing():
            launch.check_indices(layout, num_blocks)

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
        self.check_plan(plan)
        if plan.layout is None:
            raise ValueError("plan.layout=None: expected a plan made with a layout")
        shape = (plan.total_q, self.num_qo_heads, self.head_dim_v)
        check_tensor("out_state", out_state, dtype=torch.float32, ndim=3, device=self.device)
        if tuple(out_state.shape) != shape:
            raise ValueError(f"out_state.shape={tuple(out_state.shape)}: expected {shape}")
        if self.variant.use_softmax:
            check_tensor("lse_state", lse_state, dtype=torch.float32, ndim=2, device=self.device)
            assert lse_state is not None
            if tuple(lse_state.shape) != shape[:2]:
                raise ValueError(f"lse_state.shape={tuple(lse_state.shape)}: expected {shape[:2]}")
            lse_state = lse_state.contiguous()
        elif lse_state is not None or return_lse:
            raise ValueError(
                f"lse_state, return_lse: expected none, {self.variant.name} uses no softmax and has no LSE"
            )
        values = self._values(params, plan.num_requests)
        if out is None:
            out = out_state.new_empty(shape, dtype=self.dtype)
        else:
            self._check_rows("out", out, self.dtype, self.head_dim_v, plan)
        lse = out_state.new_empty(shape[:2]) if return_lse else None
        words = pack(self.variant.params, values)
        launch.finish(self, plan.buffer, plan.layout, (out_state.contiguous(), lse_state), out, lse, words)
        return out if lse is None else (out, lse)

    @staticmethod
    def _launch(
        engine: Attention,
        plan: Plan,
        layout: BlockSparseLayout,
        num_blocks: int,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
        values: Sequence[Value],
        scales: tuple[float, float, float],
        unfinished: bool,
    ) -> None:
        """The direct path: no dispatcher between the caller and the kernel."""
        if num_blocks not in plan.checked_blocks:
            launch.check_indices(layout, num_blocks)
            plan.checked_blocks.add(num_blocks)
        words = pack(engine.variant.params, values)
        launch.run(engine, plan.buffer, plan.num_workers, layout, plan.block_mask, tensors, words, scales, unfinished)

    def _key_with(self, block_mask: BlockMask | None) -> PlanKey:
        """A block mask stands for one variant's mask: a plan with it serves that variant only."""
        return self.plan_key if block_mask is None else self.plan_key._replace(ranges=self.spec.name)

    def check_plan(self, plan: Plan) -> None:
        """A plan is one of this engine's key."""
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
        key = self._key_with(plan.block_mask)
        if plan.key is key or plan.key == key:
            return
        if plan.key != key._replace(tile_q=key.tile_q_short):  # else a plan of short query tiles
            raise ValueError(f"plan.key={plan.key}: expected that of this engine, {key}")

    def _check_rows(self, name: str, rows: Tensor, dtype: torch.dtype, head_dim: int, plan: Plan) -> None:
        check_tensor(name, rows, dtype=dtype, ndim=3, device=self.device)
        if rows.shape[0] < plan.total_q or rows.shape[1] != self.num_qo_heads or rows.shape[2] != head_dim:
            raise ValueError(
                f"{name}.shape={tuple(rows.shape)}: expected [>= {plan.total_q}, {self.num_qo_heads}, {head_dim}]"
            )
        check_contiguous_last(name, rows)

    def _check_cache(self, name: str, cache: Tensor, layout: BlockSparseLayout) -> int:
        """Returns the number of blocks."""
        check_tensor(name, cache, dtype=self.kv_dtype, ndim=4, device=self.device)
        if tuple(cache.shape[1:]) != (layout.block_size, self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"{name}.shape={tuple(cache.shape)}: expected "
                f"[num_blocks, {layout.block_size}, {self.num_kv_heads}, {self.head_dim}]"
            )
        check_contiguous_last(name, cache)
        if not torch.compiler.is_compiling():
            check_aligned(name, cache)
        return cache.shape[0]

"""An emulated kernel: planned, launched and finished as an engine on a GPU does it, without an engine."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from attnloom.core.abi import AttentionParams, BlockMaskParams, FinishParams, checked
from attnloom.core.arena import floats_on_gpu
from attnloom.core.block_mask import BlockMask
from attnloom.core.engine_params import EngineParams
from attnloom.core.launch import layout_tensors, rows_tensor
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.planner import longest, plan_scan
from attnloom.core.templates import PLAN_AT, Template, words_of
from attnloom.core.tiles import SM80, is_slim
from integration_tests.gpu.batch import SPARE_ROWS, Batch, Output
from integration_tests.gpu.cases import Case
from integration_tests.gpu.kernels import Kernel
from tests.emulation.guarded import Guarded

TARGET = "90a"
_HOST = torch.device("cpu")


class EmulatedKernel:
    """A library of build.py, and a batch for it.

    Attributes:
        short: whether the plan has short query tiles only, which is another kernel of the module.
    """

    def __init__(self, library: Path, kernel: Kernel, case: Case, batch: Batch) -> None:
        self.kernel, self.case, self.batch = kernel, case, batch
        self.module = ctypes.CDLL(str(library))
        names = ["attnloom_run", "attnloom_finish"]
        self.masked = case.block_mask
        if self.masked:
            names.append("attnloom_block_mask")
        checked(self.module, names, [AttentionParams, FinishParams, BlockMaskParams])
        variant = kernel.case.variant
        sizes = {
            "num_qo_heads": case.num_qo_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_dim": kernel.head_dim,
            "head_dim_v": kernel.head_dim,
        }
        self.words = EngineParams(variant, sizes, _HOST).words(batch.params or None, len(case.kv_lens))
        slim = is_slim(kernel.head_dim, kernel.kv_dtype, variant)
        self.tiles = SM80.tiles_for(kernel.head_dim, TARGET, slim=slim, batch_invariant=kernel.chunk > 0)
        self.short = longest(batch.indptr()) * case.group <= self.tiles.tile_q_short

    def _see(self, seed: int) -> None:
        """Another order of the threads; copies may read the batch's tensors and no other memory."""
        self.module.emulation_seed(ctypes.c_uint32(seed))
        layout = self.batch.layout
        for tensor in (self.batch.q, self.batch.k_cache, self.batch.v_cache, layout.indices, layout.positions):
            if tensor is not None:
                storage = tensor.untyped_storage()
                self.module.emulation_readable(ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(storage.nbytes()))

    def plan(self) -> Plan:
        """For lengths that may differ from the true ones."""
        case, tiles = self.case, self.tiles
        tile_q = tiles.tile_q_short if self.short else tiles.tile_q
        chunk = self.kernel.chunk
        heads = (case.num_qo_heads, case.num_kv_heads)
        key = PlanKey(*heads, tiles.tile_q_short, tile_q, tiles.tile_kv, case.left, case.right, _HOST, "", chunk)
        assert case.num_workers is not None
        return plan_scan(
            self.batch.indptr(),
            torch.tensor(case.planned, dtype=torch.int32),
            key,
            num_workers=case.num_workers,
            lockstep=math.gcd(case.num_kv_heads, case.num_workers),
            costs=tiles.costs,
            layout=self.batch.layout,
            block_mask=self._block_mask() if self.masked else None,
        )

    def _block_mask(self) -> BlockMask:
        size, length = self.tiles.tile_kv, max([1, *self.case.planned, *self.case.kv_lens])
        blocks = -(-length // size)
        kinds = torch.full((len(self.case.kv_lens), blocks, blocks), 255, dtype=torch.uint8)
        params = BlockMaskParams(ctypes.addressof(self.words), kinds.data_ptr(), *kinds.shape, 0, blocks, blocks)
        params.num_qo_heads, params.num_kv_heads = self.case.num_qo_heads, self.case.num_kv_heads
        params.length = length
        self._see(self.case.seed)
        assert self.module.attnloom_block_mask(ctypes.byref(params)) == 0
        return BlockMask(kinds, size)

    def run(self, plan: Plan, seed: int) -> tuple[Tensor, Tensor | None]:
        """Rows and LSE of a launch with its threads in the order of ``seed``, spare rows included; or states."""
        case, batch, kernel = self.case, self.batch, self.kernel
        state = case.mode == "state"
        dtype = torch.float32 if state else kernel.dtype
        output = Output(case.total_q + SPARE_ROWS, case.num_qo_heads, kernel.head_dim, dtype)
        lse = None
        if case.mode != "out" and kernel.case.variant.use_softmax:
            lse = torch.full((case.total_q + SPARE_ROWS, case.num_qo_heads), math.nan)
        scale = kernel.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
        tile_q = plan.key.tile_q
        numbers = (plan.total_q, plan.num_workers, batch.layout.block_size, tile_q, plan.lockstep)
        scales = (scale, case.k_scale, case.v_scale)
        flags = (lse is not None, state)
        heads = (case.num_qo_heads, case.num_kv_heads)
        tensors = (batch.q, batch.k_cache, batch.v_cache, output.view)
        template = Template(*tensors, scales, flags, numbers, heads)
        room = floats_on_gpu(plan.num_workers, tile_q, kernel.head_dim, kernel.chunk > 0)
        arena = Guarded(room, math.nan)  # merges may read behind the last state, as far as there is room
        arrivals = torch.zeros(plan.num_workers, dtype=torch.int32)
        template.words[PLAN_AT] = words_of(plan)
        params = template.params
        params.lse = None if lse is None else lse.data_ptr()
        params.arena, params.arrivals = arena.floats.data_ptr(), arrivals.data_ptr()
        params.hook_params = ctypes.addressof(self.words)
        self._see(seed)
        assert self.module.attnloom_run(template.argument) == 0
        output.assert_untouched(case.total_q)
        assert lse is None or bool(lse[case.total_q :].isnan().all()), "LSEs behind the batch's were written"
        assert not bool(arrivals.any()), "arrival counters are not zero after the launch"
        return output.view, lse

    def finish(self, plan: Plan, state: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Finished rows of the batch's states, which have spare rows."""
        total = self.case.total_q
        output = Output(total + SPARE_ROWS, self.case.num_qo_heads, self.kernel.head_dim, self.kernel.dtype)
        values, done_lse = state[:total].contiguous(), None if lse is None else torch.full_like(lse, math.nan)
        params = FinishParams(
            values.data_ptr(),
            None if lse is None else lse.data_ptr(),
            rows_tensor(output.view),
            None if done_lse is None else done_lse.data_ptr(),
            layout_tensors(self.batch.layout),
            plan.buffer.data_ptr(),
            ctypes.addressof(self.words),
        )
        params.total_q = total
        self._see(self.case.seed)
        assert self.module.attnloom_finish(ctypes.byref(params)) == 0
        output.assert_untouched(total)
        return output.view, done_lse

"""The sm80 decode kernel against float64, over random layouts, lengths, groups, strides, variants and plans.

Few kernels, many shapes. Run on a machine with a CUDA device: ``pytest integration_tests/gpu``.
"""

from __future__ import annotations

import ctypes
import math
import random

import pytest
import torch
from torch import Tensor

from attnloom import BlockSparseLayout, Variant, plan_scan, variants
from attnloom.core import launch
from attnloom.core.abi import AttentionParams, BlockMaskTensor
from attnloom.core.jit.build import build
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.kernels import attention_spec
from attnloom.core.params import Value, pack
from attnloom.core.plan import PlanKey
from attnloom.core.tiles import Costs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TILE_Q = 16
HOOKED = variants.SoftCap() & variants.ALiBi() & variants.Sinks()
KERNELS = [
    (torch.bfloat16, 128, Variant("plain")),
    (torch.float16, 128, Variant("plain")),
    (torch.bfloat16, 64, Variant("plain")),
    (torch.bfloat16, 80, Variant("plain")),
    (torch.bfloat16, 128, HOOKED),
]
CASES_PER_KERNEL = 400


def spec_of(dtype: torch.dtype, head_dim: int, variant: Variant) -> ModuleSpec:
    major, minor = torch.cuda.get_device_capability()
    target = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    return attention_spec("sm80", dtype, head_dim, head_dim, variant, target)


@pytest.fixture(scope="module", autouse=True)
def prebuilt() -> None:
    build([spec_of(*kernel) for kernel in KERNELS])


class Case:
    """One random problem: every slot that no query may read holds NaN."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, head_dim: int, variant: Variant) -> None:
        self.dtype, self.head_dim, self.variant = dtype, head_dim, variant
        self.num_kv_heads = rng.choice([1, 2, 3, 4, 8])
        self.group = rng.choice([1, 2, 4, 7, 8, 16])
        self.num_qo_heads = self.num_kv_heads * self.group
        self.page = rng.choice([1, 3, 16, 32, 64, 100])
        requests = rng.randint(1, 9)
        longest = rng.choice([5, 70, 400, 3000])
        self.qo_lens = [rng.randint(0, 16 // self.group) for _ in range(requests)]
        self.kv_lens = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(requests)]
        self.planned = [length + rng.choice([0, 0, rng.randint(0, 200)]) for length in self.kv_lens]
        self.left = rng.choice([None, None, 0, rng.randint(1, 200)])
        self.right = rng.choice([0, 0, None])
        self.interleaved = rng.random() < 0.5
        self.lockstep = rng.choice([1, math.gcd(self.num_kv_heads, 24)])
        self.num_workers = rng.choice([1, 7, 24, 264]) * self.lockstep
        self._fill(rng)

    def _fill(self, rng: random.Random) -> None:
        # The table is as long as the plan allows: a kernel that trusted planned lengths would read its padding.
        pages = [-(-length // self.page) for length in self.planned]
        total = sum(pages) + 3
        shape = (total, self.num_kv_heads, self.page, 2 * self.head_dim)
        if not self.interleaved:
            shape = (total, self.page, self.num_kv_heads, 2 * self.head_dim)
        cache = torch.full(shape, math.nan, device="cuda", dtype=self.dtype)
        cache = cache.transpose(1, 2) if self.interleaved else cache
        self.k, self.v = cache[..., : self.head_dim], cache[..., self.head_dim :]
        order = torch.randperm(total).tolist()
        self.table = torch.zeros(len(pages), max([1, *pages]), dtype=torch.int32)
        self.dense: list[tuple[Tensor, Tensor]] = []
        at = 0
        for row, count in enumerate(pages):
            mine = order[at : at + count]
            at += count
            self.table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            length = self.kv_lens[row]
            kv = torch.randn(2, length, self.num_kv_heads, self.head_dim, device="cuda").to(self.dtype)
            first = length - self.qo_lens[row] - self.left if self.left is not None else 0
            for slot in range(max(first, 0), length):
                self.k[mine[slot // self.page], slot % self.page] = kv[0, slot]
                self.v[mine[slot // self.page], slot % self.page] = kv[1, slot]
            self.dense.append((kv[0].double(), kv[1].double()))
        self.tokens = sum(self.qo_lens)
        padded = self.tokens + rng.randint(0, 3)
        wide = torch.randn(padded, self.num_qo_heads + 1, self.head_dim + 8, device="cuda").to(self.dtype)
        self.q = wide[:, :-1, : self.head_dim]
        self.out = torch.full_like(self.q, 7.0)
        self.lse = torch.full((padded, self.num_qo_heads), 7.0, device="cuda")
        self.sm_scale = rng.choice([self.head_dim**-0.5, 0.3])
        self.values: dict[str, Value] = {}
        if self.variant.params:
            self.values = {
                "logit_cap": 5.0,
                "alibi_slopes": torch.rand(self.num_qo_heads, device="cuda"),
                "sinks": torch.randn(self.num_qo_heads, device="cuda"),
            }

    def run(self) -> None:
        indptr = torch.tensor([0, *self.qo_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
        key = PlanKey(
            self.num_qo_heads, self.num_kv_heads, TILE_Q, TILE_Q, 64, self.left, self.right, torch.device("cpu")
        )
        plan = plan_scan(
            indptr,
            torch.tensor(self.planned, dtype=torch.int32),
            key,
            num_workers=self.num_workers,
            lockstep=self.lockstep,
            costs=Costs(8, 16, 0),
        )
        lengths = torch.tensor(self.kv_lens, dtype=torch.int32, device="cuda")
        layout = BlockSparseLayout.from_page_table(self.table.cuda(), lengths, self.page)
        buffer = plan.buffer.cuda()
        # Poisoned: a piece that was never written must not be merged.
        arena = torch.full((2 * self.num_workers * TILE_Q * (self.head_dim + 1),), math.nan, device="cuda")
        arrivals = torch.zeros(self.num_workers, dtype=torch.int32, device="cuda")
        words = pack(self.variant.params, [self.values[param.name] for param in self.variant.params])
        params = AttentionParams(
            launch.rows_tensor(self.q),
            launch.cache_tensor(self.k),
            launch.cache_tensor(self.v),
            launch.rows_tensor(self.out),
            self.lse.data_ptr(),
            launch.layout_tensors(layout),
            BlockMaskTensor(),
            buffer.data_ptr(),
            arena.data_ptr(),
            arrivals.data_ptr(),
            ctypes.addressof(words),
            self.sm_scale,
            1.0,
            1.0,
            0,
            1,
        )
        kernel = load(spec_of(self.dtype, self.head_dim, self.variant)).attnloom_run_decode
        kernel.argtypes = [ctypes.POINTER(AttentionParams), ctypes.c_int32, ctypes.c_void_p]
        error = kernel(ctypes.byref(params), self.num_workers, torch.cuda.current_stream().cuda_stream)
        assert error == 0, f"CUDA error {error}"
        torch.cuda.synchronize()
        assert not arrivals.any(), "arrival counters must reset themselves"

    def expected(self) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for row, (k, v) in enumerate(self.dense):
            queries, length = self.qo_lens[row], self.kv_lens[row]
            start = sum(self.qo_lens[:row])
            q = self.q[start : start + queries].double()
            scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(self.group, 1)) * self.sm_scale
            position = torch.arange(queries, device="cuda")[:, None] + length - queries
            key = torch.arange(length, device="cuda")[None, :]
            if self.values:
                cap = float(self.values["logit_cap"])
                scores = cap * torch.tanh(scores / cap)
                scores = scores + self.values["alibi_slopes"].double()[None, :, None] * (key - position)[:, None, :]
            seen = torch.ones(queries, length, dtype=torch.bool, device="cuda")
            if self.right is not None:
                seen &= key <= position + self.right
            if self.left is not None:
                seen &= key >= position - self.left
            scores = scores.masked_fill(~seen[:, None, :], -math.inf)
            if self.values:
                sinks = self.values["sinks"].double()[None, :, None].expand(queries, -1, 1)
                scores = torch.cat([scores, sinks], 2)
                v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
            lses.append(torch.logsumexp(scores, 2))
            weights = torch.nan_to_num(scores.softmax(2))
            outs.append(torch.einsum("qhk,khd->qhd", weights, v.repeat_interleave(self.group, 1)))
        return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel[0]}-{kernel[1]}-{kernel[2].name}")
def test_random_problems(kernel: tuple[torch.dtype, int, Variant]) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for index in range(CASES_PER_KERNEL):
        case = Case(rng, *kernel)
        where = f"seed {seed}, case {index}: {vars(case)['qo_lens']}, {case.kv_lens}, planned {case.planned}"
        case.run()
        out, lse = case.out[: case.tokens].double(), case.lse[: case.tokens].double()
        expected, expected_lse = case.expected()
        assert torch.equal(lse.isinf(), expected_lse.isinf()), where
        finite = ~expected_lse.isinf()
        torch.testing.assert_close(lse[finite], expected_lse[finite], atol=2e-3, rtol=1e-3, msg=where)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2, msg=where)
        assert bool((case.out[case.tokens :] == 7).all()), f"rows past the queries were touched; {where}"
        again = case.out.clone()
        case.run()
        assert torch.equal(again, case.out), f"two runs differ; {where}"

"""What attnloom's SGLang backend does once a step, before any layer: SGLang's batch to a layout and a plan.

    python benchmarks/sglang_adapter.py [--json FILE]

No model and no SGLang: a batch is the tensors that SGLang's ForwardBatch holds, the token table has its shape. The last
rows are of a layer: what reading pages of a paged pool saves its decode against reading every slot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, Target, arguments, publish

from attnloom import Attention, variants
from attnloom.adapters.token_table import TokenTable, slot_cache
from attnloom.backends.sglang.step import Pool, Step, Steps
from attnloom.backends.sglang.verified import VerifiedTrees
from attnloom.backends.sglang.windowed import HostWindowedSteps
from attnloom.core.launch import check_indices

REQUESTS, TOKENS, CONTEXT = 64, 4096, 16384
DRAFTS, WINDOW, PAGE = 4, 1024, 16
HEADS, KV_HEADS, DIM = 32, 8, 128
TARGET = Target("ours", 100, "us")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(2)
    slots = REQUESTS * CONTEXT
    table = torch.randperm(slots).to(torch.int32).view(REQUESTS, CONTEXT)
    table = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int32), table])  # row 0 is padding
    steps, trees = Steps(table, REQUESTS), VerifiedTrees(REQUESTS, table.device)
    causal = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32)
    tree = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=variants.Full() & variants.PackedMask())

    def planned(engine: Attention, step: Step) -> Step:
        step.plan(Pool.FULL, engine.plan_key, engine, step.tree)
        return step

    def decode(tokens: int) -> Callable[[], Step]:
        asked = batch(tokens)
        return lambda: planned(causal, steps.decode(asked))

    rows, by_length = [], {}
    for tokens in (256, TOKENS, CONTEXT):
        took = by_length[tokens] = sample(decode(tokens), options.repeats)
        target = TARGET if tokens == TOKENS else None
        rows.append(Row(f"decode {REQUESTS} x {tokens}: layout and plan", took["median"], target=target, detail=took))
    ratio = by_length[CONTEXT]["median"] / by_length[256]["median"]
    growth = f"decode, {CONTEXT} tokens over 256"
    rows.append(Row(growth, ratio, "x", target=Target("ours", 1.15)))

    def add(name: str, function: Callable[[], Any], target: Target | None = None) -> None:
        took = sample(function, options.repeats)
        rows.append(Row(name, took["median"], target=target, detail=took))

    asked = batch(TOKENS)
    add("  of it the layout", lambda: steps.decode(asked))
    extended = batch(TOKENS, extend_seq_lens=torch.full((REQUESTS,), 16, dtype=torch.int32))
    add(f"extend by 16 behind {TOKENS - 16}", lambda: planned(causal, steps.extend(extended)), TARGET)
    verified = batch(TOKENS, spec_info=drafts())

    def verify() -> Step:
        made = steps.verify(verified)
        trees.stage(verified)
        made.tree = trees.params(verified)
        return planned(tree, made)

    add(f"verify trees of {DRAFTS} behind {TOKENS}", verify)

    step, in_pages = steps.decode(asked), Steps(table, REQUESTS, PAGE).decode(asked)
    mapping = torch.randperm(slots)
    windowed = HostWindowedSteps(steps.table, WINDOW - 1, sees_every_step=True)

    def translate(after_prefill: bool, made: Step = step) -> None:
        windowed.decoded = None if after_prefill else (made.rows, made.kv_lens)
        windowed.translate(made, mapping, decode=True)
        windowed.layout(made)

    add(f"pool of windowed layers ({WINDOW}): decode after decode", lambda: translate(False), TARGET)
    add(f"pool of windowed layers ({WINDOW}): any other step", lambda: translate(True))
    add(f"  the same in pages of {PAGE}", lambda: translate(True, in_pages))
    add("the engine's check of slots, CPU only", lambda: check_indices(step.layouts[Pool.FULL], slots))
    add(f"  the same in pages of {PAGE}", lambda: check_indices(in_pages.layouts[Pool.FULL], slots))
    for heads, kv_heads, dim, dtype in ((32, 8, 128, torch.bfloat16), (9, 3, 64, torch.float32)):
        rows += decode_by_slots_and_pages(heads, kv_heads, dim, dtype, options.repeats)
    publish("sglang_adapter", rows, options.json)


def batch(tokens: int, **more: Any) -> Any:
    """What a step reads of SGLang's ForwardBatch, as SGLang types it, without lengths on the host."""
    fields = {
        "batch_size": REQUESTS,
        "req_pool_indices": torch.randperm(REQUESTS) + 1,
        "seq_lens": torch.full((REQUESTS,), tokens),
        "seq_lens_cpu": None,
        "extend_seq_lens": None,
        "extend_seq_lens_cpu": None,
        "encoder_lens": None,
        "spec_info": None,
    }
    return SimpleNamespace(**fields | more)


def decode_by_slots_and_pages(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, repeats: int) -> list[Row]:
    """A layer's decode, 16 requests of 2048 tokens in shuffled pages: one table, read by slots and by pages in turn.

    Milliseconds of one thread's processor time.
    """
    requests, tokens = 16, 2048
    slots = requests * tokens
    pages = torch.randperm(slots // PAGE)[:, None] * PAGE + torch.arange(PAGE)
    table = TokenTable.of(pages.to(torch.int32).view(requests, tokens))
    keys, values = torch.randn(2, slots, kv_heads, dim).to(dtype)
    q = torch.randn(requests, heads, dim).to(dtype)
    engine = Attention(heads, kv_heads, dim, dtype=dtype)
    lengths = torch.full((requests,), tokens, dtype=torch.int32)
    indptr = torch.arange(requests + 1, dtype=torch.int32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs: dict[int, Callable[[], torch.Tensor]] = {}
    for size in (1, PAGE):
        plan = engine.plan(indptr, table.layout(torch.arange(requests), lengths, page_size=size))
        caches = slot_cache(keys, size), slot_cache(values, size)
        runs[size] = partial(engine.run, plan, q, *caches)
    assert torch.equal(runs[1](), runs[PAGE]())
    took: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(max(repeats // 5, 5)):
        for size, run in runs.items():
            begin = time.process_time()
            run()
            took[size].append((time.process_time() - begin) * 1e3)
    torch.set_num_threads(threads)
    name = f"decode {requests} x {tokens}, {heads}/{kv_heads} d{dim} {str(dtype).removeprefix('torch.')}"
    slow, fast = (statistics.median(took[size]) for size in runs)
    return [
        Row(f"{name}: by slots", slow, "ms", detail={"median": slow, "fastest": min(took[1])}),
        Row(f"  by pages of {PAGE}", fast, "ms", detail={"median": fast, "fastest": min(took[PAGE])}),
        Row("  slots over pages", slow / fast, "x", detail={"fastest": min(took[1]) / min(took[PAGE])}),
    ]


def drafts() -> Any:
    """A tree of drafts, its mask without the prefix."""
    mask = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).tril().repeat(REQUESTS, 1).flatten()
    return SimpleNamespace(draft_token_num=DRAFTS, custom_mask=mask, topk=2)


def sample(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of a call: median and fastest."""
    for _ in range(20):
        function()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        took.append((time.perf_counter() - begin) * 1e6)
    return {"median": statistics.median(took), "fastest": min(took), "calls": repeats}


if __name__ == "__main__":
    main()

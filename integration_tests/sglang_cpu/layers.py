"""Layers that the tiny models do not have, made of SGLang's own classes: what attnloom computes, against float64.

    python -m integration_tests.sglang_cpu.layers TASK.json RESULT.json

The task is `[]`. Each function `check_...` below is a case; the result is a list as the conformance kit's. A runner is
the kit's: real pools and batches around one layer.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnloom.backends.sglang.step import Pool
from integration_tests.sglang_cpu.checks import run_checks
from integration_tests.sglang_cpu.kit import paged_pools
from tests.oracle import Answer, Array, At, Band, DenseRequest, Hooks, attention
from tests.tolerance import assert_out

HEADS, KV_HEADS, DIM = 4, 2, 64
PREFIXES, NEW = (5, 0, 70), (3, 9, 2)
CONTEXT = 128


@dataclass
class Fixture:
    """A runner with attnloom as its backend, one step, and what its layers are given."""

    runner: Any
    backend: Any
    batch: Any
    q: Tensor
    k: Tensor
    v: Tensor
    lens: tuple[int, ...]

    def layer(self, **fields: Any) -> Any:
        """A RadixAttention."""
        from sglang.srt.layers.radix_attention import RadixAttention

        temperature = fields.pop("xai_temperature_len", -1)
        layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **fields)
        layer.xai_temperature_len = temperature
        return layer

    def run(self, layer: Any, *, write: bool = True, **more: Any) -> Tensor:
        """The layer in this step: [tokens, heads, DIM]."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        k, v = (self.k, self.v) if write else (None, None)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(self.batch)
            out = layer(self.q.flatten(1), k, v, self.batch, **more)
        return out.view(-1, HEADS, DIM)

    def expected(self, band: Band = Band(), hooks: Hooks = Hooks(), first: tuple[int, ...] = (0, 0, 0)) -> Answer:
        """The oracle's answer from what the pool holds now, request by request."""
        pool, table = self.runner.token_to_kv_pool, self.runner.req_to_token_pool.req_to_token
        keys, values = pool.get_kv_buffer(0)
        requests, begin = [], 0
        for row, (length, start) in enumerate(zip(self.lens, first, strict=True)):
            count = 1 if self.batch.forward_mode.is_decode() else NEW[row]
            slots = table[row, start : start + length].long()
            own = self.q[begin : begin + count]
            requests.append(DenseRequest(own, keys[slots], values[slots], list(range(length))))
            begin += count
        return attention(requests, band=band, hooks=hooks)


def fixture(mode: str = "EXTEND", *, drafts: int = 0, page_size: int = 1, **arguments: Any) -> Fixture:
    """Three requests; every slot that is no request's is NaN."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

    torch.manual_seed(len(mode))
    forward_mode = ForwardMode[mode]
    case = dense.DenseAttentionCase(
        name=mode,
        backend="attnloom",
        forward_mode=forward_mode,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        page_size=page_size,
        prefix_lens=PREFIXES if not drafts else (5, 1, 70),
        extend_lens=() if forward_mode.is_decode() else NEW if not drafts else (drafts,) * 3,
    )
    config = dense.TinyModelConfig(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, hidden_size=64, context_len=CONTEXT
    )
    runner = dense.MockModelRunner(
        case=case, model_config=config, dtype=torch.float32, device="cpu", max_context_len=CONTEXT, head_dim=DIM
    )
    runner.server_args = copy(runner.server_args)
    for name, value in arguments.items():
        object.__setattr__(runner.server_args, name, value)  # SGLang's own raises once it has begun
    backend = ATTENTION_BACKENDS["attnloom"](runner)
    locations = dense.make_loc_fn(
        "shuffled_pages",
        batch_size=3,
        seq_lens=case.seq_lens,
        prefix_lens=case.prefix_lens,
        page_size=page_size,
        max_context_len=CONTEXT,
    )
    batch = dense._make_forward_batch(case, runner, max_context_len=CONTEXT, device="cpu", loc_fn=locations)
    for buffer in runner.token_to_kv_pool.get_kv_buffer(0):
        buffer.fill_(torch.nan)
        for row, length in enumerate(case.seq_lens):
            slots = runner.req_to_token_pool.req_to_token[row, :length].long()
            buffer[slots] = torch.randn(length, KV_HEADS, DIM)
    tokens = case.num_input_tokens
    q = torch.randn(tokens, HEADS, DIM)
    k, v = torch.randn(2, tokens, KV_HEADS, DIM)
    return Fixture(runner, backend, batch, q, k, v, case.seq_lens)


def close(out: Tensor, answer: Answer) -> None:
    assert_out(out, answer, DIM, torch.float32)


def check_sinks(case: object) -> None:
    sinks = torch.randn(HEADS, dtype=torch.bfloat16)
    for mode in ("EXTEND", "DECODE"):
        made = fixture(mode)
        out = made.run(made.layer(sliding_window_size=7), sinks=sinks)
        hooks = Hooks(sink=lambda at: float(sinks[at.q_head]))
        close(out, made.expected(Band(left=7), hooks))


def check_soft_cap_and_grok_temperature(case: object) -> None:
    length = 20

    def transform(logits: Array, at: At) -> Array:
        assert at.q_pos is not None
        hot = np.log2(np.maximum(at.q_pos, 1)) / np.log2(length)
        return 3.0 * np.tanh(logits / 3.0) * np.where(at.q_pos > length, hot, 1.0)

    for mode in ("EXTEND", "DECODE", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2"):
        made = fixture(mode)
        layer = made.layer(logit_cap=3.0, xai_temperature_len=length)
        close(made.run(layer), made.expected(hooks=Hooks(logits_transform=transform)))


def check_keys_of_another_layer(case: object) -> None:
    """k and v are None: they lie in the cache already."""
    for mode in ("EXTEND", "DECODE"):
        made = fixture(mode)
        close(made.run(made.layer(), write=False), made.expected())


def check_keys_that_the_model_wrote(case: object) -> None:
    made = fixture()
    close(made.run(made.layer(), save_kv_cache=False), made.expected())


def check_encoder_only(case: object) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    made = fixture()
    close(made.run(made.layer(attn_type=AttentionType.ENCODER_ONLY)), made.expected(Band(None, None)))


def check_bidirectional_prompts(case: object) -> None:
    """Prompts see themselves whole, with windows to the left; what is generated sees what is before it."""
    from sglang.srt.layers.radix_attention import AttentionType

    for mode, right in (("EXTEND", None), ("DECODE", 0)):
        for window in (-1, 6):
            made = fixture(mode)
            layer = made.layer(attn_type=AttentionType.DECODER_BIDIRECTIONAL, sliding_window_size=window)
            close(made.run(layer), made.expected(Band(None if window < 0 else window, right)))


def check_cross_attention(case: object) -> None:
    """The encoder's tokens lie at the beginning of each row, the text's behind them."""
    encoder = (4, 0, 33)
    for mode in ("EXTEND", "DECODE"):
        made = fixture(mode)
        table = made.runner.req_to_token_pool.req_to_token
        slots = iter(range(1, made.runner.token_to_kv_pool.size))
        for row, (length, before) in enumerate(zip(made.lens, encoder, strict=True)):
            for column in range(before + length):
                table[row, column] = next(slots)
        for buffer in made.runner.token_to_kv_pool.get_kv_buffer(0):
            buffer.copy_(torch.randn(buffer.shape))
        made.batch.encoder_lens = torch.tensor(encoder)
        made.batch.encoder_out_cache_loc = torch.empty(0, dtype=torch.int64)
        close(made.run(made.layer(), write=False), made.expected(first=encoder))
        cross = made.run(made.layer(is_cross_attention=True), write=False)
        text, made.lens = made.lens, encoder
        close(cross, made.expected(Band(None, None)))
        made.lens = text


def check_pages_where_they_are_known(case: object) -> None:
    """Of SGLang's own allocators of pages; what else hands out slots is read slot by slot."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from attnloom.backends.sglang import compat

    class Other(PagedTokenToKVPoolAllocator):
        pass

    for mode in ("EXTEND", "DECODE"):
        for known in (True, False):
            with paged_pools() if known else nullcontext():
                made = fixture(mode, page_size=16)
            close(made.run(made.layer(sliding_window_size=20)), made.expected(Band(left=20)))
            assert made.backend.step.layouts[Pool.FULL].block_size == (16 if known else 1)
    allocator = Other.__new__(Other)
    allocator.page_size = 16
    assert compat.page_size(allocator) == compat.page_size(None) == 1


def check_text_behind_an_encoder_in_a_paged_pool(case: object) -> None:
    """The text begins in the middle of a page, and its slots keep to none."""
    encoder = (5, 0, 16)
    with paged_pools():
        made = fixture("DECODE", page_size=16)
    table = made.runner.req_to_token_pool.req_to_token
    slots = iter(torch.randperm(made.runner.token_to_kv_pool.size - 1).tolist())
    for row, (length, before) in enumerate(zip(made.lens, encoder, strict=True)):
        for column in range(before + length):
            table[row, column] = next(slots) + 1
    for buffer in made.runner.token_to_kv_pool.get_kv_buffer(0):
        buffer.copy_(torch.randn(buffer.shape))
    made.batch.encoder_lens = torch.tensor(encoder)
    made.batch.encoder_out_cache_loc = torch.empty(0, dtype=torch.int64)
    close(made.run(made.layer(), write=False), made.expected(first=encoder))


def check_trees_of_drafts(case: object) -> None:
    """A mask among drafts together with a window, a cap and sinks; the kit has it alone and with a window."""
    drafts, window = 4, 6
    made = fixture("TARGET_VERIFY", drafts=drafts)
    seen = torch.eye(drafts, dtype=torch.bool)
    seen[1:, 0] = seen[3, 1] = True
    prefixes = torch.tensor([length - drafts for length in made.lens])
    made.batch.seq_lens = prefixes.to(torch.int32)
    made.batch.spec_info = SimpleNamespace(draft_token_num=drafts, topk=2, custom_mask=seen.repeat(3, 1).flatten())
    sinks = torch.randn(HEADS)
    out = made.run(made.layer(sliding_window_size=window, logit_cap=2.0), sinks=sinks)

    def mask(at: At) -> Array:
        assert at.kv_index is not None and at.q_index is not None
        draft = at.kv_index - int(prefixes[at.request])
        return (draft < 0) | seen.numpy()[at.q_index, np.maximum(draft, 0)]

    hooks = Hooks(
        logits_transform=lambda logits, at: 2.0 * np.tanh(logits / 2.0),
        logits_mask=mask,
        sink=lambda at: float(sinks[at.q_head]),
    )
    global NEW
    plain, NEW = NEW, (drafts,) * 3
    close(out, made.expected(Band(window, None), hooks))
    NEW = plain


def check_padding_is_zero(case: object) -> None:
    """Rows behind the queries of a step."""
    made = fixture("DECODE")
    made.q = torch.cat([made.q, torch.full((5, HEADS, DIM), torch.nan)])
    out = made.run(made.layer())
    assert out.shape[0] == 8 and not out[3:].any()
    made.q = made.q[:3]
    close(out[:3], made.expected())


def check_bits_of_a_request_in_any_batch(case: object) -> None:
    """Deterministic mode: alone, among others, and on a cached prefix, the same bits."""
    made = fixture(enable_deterministic_inference=True)
    layer = made.layer(sliding_window_size=40)
    whole = made.run(layer)
    close(whole, made.expected(Band(left=40)))
    batch, begin = made.batch, 0
    for row, count in enumerate(NEW):
        rows = slice(begin, begin + count)
        for first in range(count):
            # The last queries of the request, alone; those before them lie in the cache.
            part = replace(
                batch,
                batch_size=1,
                req_pool_indices=batch.req_pool_indices[row : row + 1],
                seq_lens=batch.seq_lens[row : row + 1],
                extend_seq_lens=torch.tensor([count - first]),
            )
            alone = Fixture(made.runner, made.backend, part, made.q[rows][first:], made.k, made.v, made.lens)
            assert torch.equal(alone.run(layer, write=False), whole[rows][first:])
        begin += count


def check_scales_of_an_eight_bit_cache(case: object) -> None:
    """SGLang's pool divides by them, the engine multiplies: what it is given makes the keys that were written again.

    The CPU's engine has no such cache, so what it is called with is looked at.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    made = fixture()
    made.runner.kv_cache_dtype = torch.float8_e4m3fn
    made.backend.token_to_kv_pool = pool = MHATokenToKVPool(
        made.runner.token_to_kv_pool.size, 1, torch.float8_e4m3fn, KV_HEADS, DIM, 1, "cpu", False
    )
    layer, given = made.layer(), {}
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(4.0)
    layer.k_scale_float, layer.v_scale_float = 0.5, 4.0
    served = made.backend._served(layer)
    assert served.kv_dtype == torch.float8_e4m3fn
    served.kv_dtype = torch.float32
    engine = served.engine(served.seen(extend=True), sinks=False)
    served.kv_dtype = torch.float8_e4m3fn
    engine.run = lambda plan, q, keys, values, **named: given.update(keys=keys, values=values, **named)
    k, v = made.k.clone(), made.v.clone()
    made.run(layer)
    slots = made.batch.out_cache_loc
    for written, cache, scale in ((k, given["keys"], given["k_scale"]), (v, given["values"], given["v_scale"])):
        assert cache.shape == (pool.size + 1, 1, KV_HEADS, DIM)
        torch.testing.assert_close(cache[slots, 0].float() * scale, written, rtol=2**-4, atol=2**-9 * scale)
    again = fixture()
    again.run(again.layer())


def check_an_idle_step(case: object) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    made = fixture("DECODE")
    made.batch.forward_mode, made.batch.batch_size = ForwardMode.IDLE, 0
    made.q = made.q[:0]
    assert made.run(made.layer()).shape == (0, HEADS, DIM)
    made = fixture("DECODE")
    made.run(made.layer())


if __name__ == "__main__":
    run_checks(globals())

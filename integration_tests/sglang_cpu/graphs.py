"""Steps in CUDA graphs, captured as SGLang does: on a CPU recorded and replayed (recording.py). Compared with float64.

    python -m integration_tests.sglang_cpu.graphs TASK.json RESULT.json

The task is `[]` for a CPU, `["cuda"]` for a GPU. Each function `check_...` below is a case; the result is a list as the
conformance kit's. Large batches are captured first, every request with one key in the slot that is nobody's. Then
batches of other sizes come, with long requests, and are filled up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from integration_tests.sglang_cpu import checks
from integration_tests.sglang_cpu.recording import Graph, Recording
from tests.oracle import Array, At, Band, DenseRequest, Hooks, attention
from tests.tolerance import assert_out

HEADS, KV_HEADS, DIM = 4, 2, 64
CONTEXT, MOST, WINDOW = 320, 8, 40
SLOTS = MOST * CONTEXT + 16
SIZES = (8, 4, 2)
BATCHES = (2, 3, 8, 1, 5, 4, 7, 2)
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
device = "cpu"


class Server:
    """SGLang's pools, its buffers for captured batches, and a model of four layers: two full, two windowed."""

    def __init__(
        self, mode: str, *, queries: int = 1, two_pools: bool = False, topk: int = 0, page_size: int = 1
    ) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

        torch.manual_seed(11)
        self.mode, self.queries, self.topk, self.page_size = ForwardMode[mode], queries, topk, page_size
        case = dense.DenseAttentionCase(
            name=mode,
            backend="attnloom",
            forward_mode=self.mode,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            page_size=1,
            prefix_lens=(1,) * MOST,
            extend_lens=() if queries == 1 else (queries,) * MOST,
        )
        config = dense.TinyModelConfig(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, hidden_size=64, context_len=CONTEXT
        )
        runner = dense.MockModelRunner(
            case=case, model_config=config, dtype=DTYPES[device], device=device, max_context_len=CONTEXT, head_dim=DIM
        )
        pool: dict[str, Any] = {
            "page_size": 1,
            "dtype": DTYPES[device],
            "head_num": KV_HEADS,
            "head_dim": DIM,
            "device": device,
        }
        if two_pools:
            runner.token_to_kv_pool = SWAKVPool(
                size=SLOTS, size_swa=SLOTS, swa_attention_layer_ids=[1, 3], full_attention_layer_ids=[0, 2], **pool
            )
            runner.token_to_kv_pool.register_mapping(torch.zeros(SLOTS + 2, dtype=torch.int64, device=device))
        else:
            runner.token_to_kv_pool = MHATokenToKVPool(size=SLOTS, layer_num=4, enable_memory_saver=False, **pool)
        runner.model = nn.Module()
        for name in range(4):
            window = WINDOW if name % 2 else -1
            layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, name, sliding_window_size=window)
            runner.model.add_module(f"attention{name}", layer)
        self.layers: list[Any] = list(runner.model.children())
        self.runner, self.pool = runner, runner.token_to_kv_pool
        self.table = runner.req_to_token_pool.req_to_token
        self.backend: Any = ATTENTION_BACKENDS["attnloom"](runner)
        self.backend.steps.page_size = page_size  # as if SGLang's allocator of pages were there
        if two_pools:
            from attnloom.backends.sglang.windowed import WindowedSteps

            # As on a GPU.
            self.backend.windowed = WindowedSteps(self.backend.steps.table, WINDOW)

        self.rows = torch.zeros(MOST, dtype=torch.int64, device=device)
        self.lengths = torch.ones(MOST, dtype=torch.int64, device=device)
        self.locations = torch.zeros(MOST * queries, dtype=torch.int64, device=device)
        self.extend_lens = torch.full((MOST,), queries, dtype=torch.int32, device=device)
        self.q = torch.zeros(MOST * queries, HEADS * DIM, dtype=DTYPES[device], device=device)
        self.k, self.v = torch.zeros(2, MOST * queries, KV_HEADS, DIM, dtype=DTYPES[device], device=device)
        self.graphs: dict[int, tuple[Recording | Graph, list[Tensor]]] = {}

    def batch(self, size: int, **more: Any) -> Any:
        """SGLang's batch over its buffers."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        tokens = size * self.queries
        batch = ForwardBatch(
            forward_mode=self.mode,
            batch_size=size,
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            req_pool_indices=self.rows[:size],
            seq_lens=self.lengths[:size],
            out_cache_loc=self.locations[:tokens],
            seq_lens_sum=size,
        )
        for name, value in more.items():
            setattr(batch, name, value)
        return batch

    def spec_info(self, mask: Tensor | None) -> Any:
        if self.mode.is_target_verify():
            return SimpleNamespace(draft_token_num=self.queries, topk=self.topk, custom_mask=mask)
        return None

    def capture(self, size: int) -> None:
        """As SGLang does: once outside, twice to warm up, and then the graph."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        self.rows.zero_()
        self.lengths.fill_(1)
        self.locations.zero_()
        tokens = size * self.queries
        more: dict[str, Any] = {}
        if self.mode.name == "DRAFT_EXTEND_V2":
            more["extend_seq_lens"] = self.extend_lens[:size]
            more["extend_seq_lens_cpu"] = [self.queries] * size
        # Whatever SGLang has for a mask there.
        given = torch.ones((size + tokens) * self.queries, dtype=torch.bool, device=device)
        batch = self.batch(size, spec_info=self.spec_info(given), **more)
        outs: list[Tensor] = []

        def once() -> None:
            self.backend.init_forward_metadata_in_graph(batch)
            outs[:] = [layer(self.q[:tokens], self.k[:tokens], self.v[:tokens], batch) for layer in self.layers]

        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_cuda_graph_state(MOST, MOST * self.queries)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            once()
            once()
            with Graph() if device == "cuda" else Recording() as recording:
                once()
        assert recording.plans == 2, "a plan for full layers, one for windowed ones"
        self.graphs[size] = (recording, outs)

    def fill(self, lengths: Sequence[int]) -> int:
        """The next batch in SGLang's buffers; returns the captured size that it is filled up to."""
        requests = len(lengths)
        size = min(size for size in self.graphs if size >= requests)
        free = self.shuffled()
        self.rows.zero_()
        self.lengths.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        self.locations.zero_()
        self.rows[:requests] = torch.randperm(MOST, device=device)[:requests] + 1
        # SGLang does not count drafts that are verified.
        uncounted = self.queries if self.mode.is_target_verify() else 0
        mapping = getattr(self.pool, "full_to_swa_index_mapping", None)
        if mapping is not None:
            mapping.zero_()
            others = self.shuffled()
        for layer in self.layers:
            for buffer in self.pool.get_kv_buffer(layer.layer_id):
                buffer[1:].fill_(torch.nan)
        for request, length in enumerate(lengths):
            self.lengths[request] = length - uncounted
            row, slots, free = int(self.rows[request]), free[:length], free[self.whole(length) :]
            self.table[row, :length] = slots.to(torch.int32)
            new = slice(request * self.queries, (request + 1) * self.queries)
            self.locations[new] = slots[length - self.queries :]
            if mapping is not None:
                seen = slots[self.whole(max(0, length - self.queries - WINDOW) + 1) - self.page_size :]
                mapping[seen], others = others[: len(seen)], others[self.whole(len(seen)) :]
            for layer in self.layers:
                own = slots if mapping is None or not layer.layer_id % 2 else mapping[slots[mapping[slots] > 0]]
                for buffer in self.pool.get_kv_buffer(layer.layer_id):
                    buffer[own[: -self.queries]] = torch.randn_like(buffer[own[: -self.queries]])
        for given in (self.q, self.k, self.v):
            given.normal_()
        return size

    def whole(self, tokens: int) -> int:
        """Tokens of as many whole pages as they need."""
        return -(-tokens // self.page_size) * self.page_size

    def shuffled(self) -> Tensor:
        """Slots of pages in any order, but the first."""
        pages = torch.randperm(SLOTS // self.page_size - 1, device=device) + 1
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, device=device)).flatten()

    def replay(self, lengths: Sequence[int], size: int, mask: Tensor | None) -> list[Tensor]:
        """What SGLang does with a batch that it has filled up."""
        requests = len(lengths)
        view = SimpleNamespace(
            batch_size=size,
            num_padding=size - requests,
            forward_mode=self.mode,
            req_pool_indices=self.rows[:size],
            seq_lens=self.lengths[:size],
            encoder_lens=None,
            out_cache_loc=self.locations[: requests * self.queries].clone(),
            spec_info=self.spec_info(mask),
        )
        if self.mode.name == "DRAFT_EXTEND_V2":
            view.spec_info = SimpleNamespace(extend_seq_lens_tensor=self.extend_lens[:size])
            view.req_pool_indices, view.seq_lens = self.rows, self.lengths
        self.backend.init_forward_metadata_out_graph(view)
        recording, outs = self.graphs[size]
        recording.replay()
        return outs

    def check(self, lengths: Sequence[int], outs: list[Tensor], where: Tensor | None, hooks: Hooks = Hooks()) -> None:
        """Each layer's rows of real requests, from what its pool holds now; where: mapping of windowed layers."""
        right = None if hooks.logits_mask else 0
        for layer, out in zip(self.layers, outs, strict=True):
            windowed = layer.layer_id % 2 == 1
            keys, values = self.pool.get_kv_buffer(layer.layer_id)
            dense = []
            for request, length in enumerate(lengths):
                slots = self.table[int(self.rows[request]), :length].long()
                if where is not None and windowed:
                    slots = where[slots]
                new = slice(request * self.queries, (request + 1) * self.queries)
                own, positions = self.q.view(-1, HEADS, DIM)[new], list(range(length))
                k, v = (buffer[slots].nan_to_num().cpu() for buffer in (keys, values))
                dense.append(DenseRequest(own.cpu(), k, v, positions))
            expected = attention(dense, band=Band(WINDOW if windowed else None, right), hooks=hooks)
            rows = out.view(-1, HEADS, DIM)[: len(lengths) * self.queries]
            assert_out(rows.cpu(), expected, DIM, DTYPES[device])


def serve(server: Server) -> None:
    """Batches that shrink and grow, in graphs that were captured before."""
    for size in SIZES:
        server.capture(size)
    draw = random.Random(5)
    for requests in BATCHES:
        lengths = [draw.randint(server.queries + 1, CONTEXT) for _ in range(requests)]
        size = server.fill(lengths)
        mapping = getattr(server.pool, "full_to_swa_index_mapping", None)
        where = None if mapping is None else mapping.clone()
        kept = server.backend.init_forward_metadata_out_graph

        def forgetful(view: Any, kept: Any = kept, mapping: Tensor | None = mapping) -> None:
            kept(view)
            # While a graph runs, SGLang gives slots away that the step after it is to have.
            if mapping is not None:
                mapping.fill_(SLOTS - 1)

        server.backend.init_forward_metadata_out_graph = forgetful
        outs = server.replay(lengths, size, None)
        del server.backend.init_forward_metadata_out_graph
        server.check(lengths, outs, where)


def check_decode(case: object) -> None:
    serve(Server("DECODE"))


def check_decode_with_windowed_layers_in_a_pool_of_their_own(case: object) -> None:
    serve(Server("DECODE", two_pools=True))


def check_pages(case: object) -> None:
    """As above with pages of 16, in one pool and in two."""
    for two_pools in (False, True):
        serve(Server("DECODE", two_pools=two_pools, page_size=16))
        serve(Server("TARGET_VERIFY", queries=3, topk=1, two_pools=two_pools, page_size=16))


def check_draft_extend(case: object) -> None:
    serve(Server("DRAFT_EXTEND_V2", queries=3))


def check_chains_of_drafts(case: object) -> None:
    serve(Server("TARGET_VERIFY", queries=3, topk=1))


def check_chains_with_windowed_layers_in_a_pool_of_their_own(case: object) -> None:
    serve(Server("TARGET_VERIFY", queries=3, topk=1, two_pools=True))


def check_trees_of_drafts(case: object) -> None:
    """Masks that come with the batch, with the prefix; and SGLang's own way, a buffer that it fills in place."""
    drafts = 3
    server = Server("TARGET_VERIFY", queries=drafts, topk=2)
    for size in SIZES:
        server.capture(size)
    draw = random.Random(6)
    for turn, requests in enumerate(BATCHES):
        lengths = [draw.randint(drafts + 1, CONTEXT) for _ in range(requests)]
        size = server.fill(lengths)
        seen = torch.rand(requests, drafts, drafts) < 0.5
        seen |= torch.eye(drafts, dtype=torch.bool)
        if turn % 2 and (own := server.backend.verify_mask) is not None:
            given = own.buffer
            given[: seen.numel()] = seen.flatten().to(device)
        else:
            rows = (torch.ones(drafts, length - drafts, dtype=torch.bool) for length in lengths)
            given = torch.cat([torch.cat([row, own], 1).flatten() for row, own in zip(rows, seen, strict=True)])
            given = given.to(device)
        outs = server.replay(lengths, size, given)

        def mask(at: At, seen: Tensor = seen, lengths: list[int] = lengths) -> Array:
            assert at.kv_index is not None and at.q_index is not None
            draft = at.kv_index - (lengths[at.request] - drafts)
            return (draft < 0) | seen[at.request].numpy()[at.q_index, np.maximum(draft, 0)]

        server.check(lengths, outs, None, Hooks(logits_mask=mask))


def check_eager_steps_between_replays(case: object) -> None:
    """A batch that is larger than any graph, or of another kind, runs in between and disturbs none."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    server = Server("DECODE")
    server.capture(4)
    for lengths in ([7, 90, 200, 33], [50, 60]):
        size = server.fill(lengths)
        outs = server.replay(lengths, size, None)
        server.check(lengths, outs, None)
        batch = server.batch(3)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=server.backend)):
            server.backend.init_forward_metadata(batch)
            server.layers[0](server.q[:3], server.k[:3], server.v[:3], batch)
        size = server.fill(lengths)
        outs = server.replay(lengths, size, None)
        server.check(lengths, outs, None)


def check_prompts_in_whole_graphs_are_refused(case: object) -> None:
    server = Server("DECODE")
    batch = server.batch(2)
    batch.forward_mode = type(server.mode).EXTEND
    checks.refused("full CUDA graphs", lambda: server.backend.init_forward_metadata_out_graph(batch, in_capture=True))
    server.runner.server_args = copy(server.runner.server_args)
    config = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    object.__setattr__(server.runner.server_args, "cuda_graph_config", config)  # SGLang's own raises once it has begun
    checks.refused("full CUDA graphs of prefill", lambda: type(server.backend)(server.runner))
    server.capture(2)
    serve_one = server.fill([9, 12])
    server.check([9, 12], server.replay([9, 12], serve_one, None), None)


if __name__ == "__main__":
    device = checks.device()
    checks.run_checks(globals())

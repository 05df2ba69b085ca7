"""The class that SGLang makes for `--attention-backend attnloom`: steps begin here, and layers are run."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from attnloom.adapters.token_table import slot_cache
from attnloom.backends.sglang import compat
from attnloom.backends.sglang.layer import Seen, ServedLayer
from attnloom.backends.sglang.step import Pool, Step, Steps
from attnloom.backends.sglang.support import bidirectional_refusal, drafts_trees, refusals
from attnloom.backends.sglang.windowed import WindowedSteps
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.serving_options import choice

# Named so that it shows under SGLang's own logging configuration.
logger = logging.getLogger("sglang.attnloom")


class AttnloomAttnBackend(AttentionBackend):
    """attnloom as a SGLang attention backend: every step's plans, and every layer's attention."""

    # Lengths are read where they lie: no copy to the host is waited for.
    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        """As SGLang calls it, after the model is loaded and before the server is healthy.

        Raises:
            NotImplementedError: for what this model or server needs and attnloom does not have, in words.
            ValueError: from the engine, for heads it has no kernel for.
        """
        super().__init__()
        reasons = refusals(model_runner)
        if reasons:
            raise NotImplementedError(f"--attention-backend attnloom cannot serve this model: {'; '.join(reasons)}")
        self.runner = model_runner
        self.device = torch.device(model_runner.device)
        # SGLang reads these names.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len: int = model_runner.model_config.context_len
        table = self.req_to_token_pool.req_to_token
        page_size = compat.page_size(getattr(model_runner, "token_to_kv_pool_allocator", None))
        self.steps = Steps(table, self.req_to_token_pool.size, table.shape[1], page_size)
        self.chosen = choice(getattr(model_runner.model_config.hf_config, "attnloom", None))
        self.layers: dict[Any, ServedLayer] = {}
        self.step: Step | None = None
        self.windowed: WindowedSteps | None = None
        self._verify_mask = self._make_verify_mask()
        self._build()

    def _build(self) -> None:
        """Compile or load what the model's layers need, so that no request waits for a compiler."""
        parents = dict(self.runner.model.named_modules())
        found = {name: module for name, module in parents.items() if isinstance(module, RadixAttention)}
        if found and self.chosen.tables:
            self._check_choice(found)
        for name, module in found.items():
            served = self._served(module, name)
            # SGLang hands sinks over with every call; models keep them beside the layer.
            parent = parents[name.rpartition(".")[0]]
            sinks = any(getattr(parent, held, None) is not None for held in ("sinks", "attention_sink_bias"))
            for seen in {served.seen(extend=False), served.seen(extend=True)}:
                served.engine(seen, sinks=sinks)
            if drafts_trees(self.runner.server_args) and not served.is_cross:
                served.engine(Seen.TREE, sinks=sinks)
        if found:
            engines = [engine for served in self.layers.values() for engine in served.engines.values()]
            kinds = ", ".join(sorted({engine.variant.name for engine in engines}))
            logger.info("Attention backend attnloom serves %d layers: %s", len(found), kinds)

    def _check_choice(self, layers: dict[str, Any]) -> None:
        """Custom variants act in every step and on every rank alike, or the server stops."""
        self.chosen.check_names(layers)
        if getattr(self.runner, "tp_size", 1) > 1:
            self.chosen.check_one_rank()
        backends = set(self.runner.server_args.get_attention_backends())
        if len(backends) > 1:
            raise NotImplementedError(
                f"{self.chosen.tables[0].place}: variants need attnloom for prefill and for decode, got "
                f"{' and '.join(sorted(backends))}: the other one would compute the model's own attention"
            )

    def _make_verify_mask(self) -> Any | None:
        """A tree mask without the prefix, for SGLang to fill: the full one takes a byte a draft and KV token."""
        drafts = self.runner.server_args.speculative_num_draft_tokens
        if not drafts or self.runner.is_draft_worker:
            return None
        requests = self.req_to_token_pool.size
        buffer = torch.zeros(requests * drafts * drafts, dtype=torch.bool, device=self.device)
        return compat.verify_mask(buffer, requests)

    def _served(self, layer: Any, name: str = "") -> ServedLayer:
        served = self.layers.get(layer)
        if served is None:
            name = name or f"with layer_id {layer.layer_id}"
            tables = self.chosen.of(name)
            served = ServedLayer(
                name,
                layer,
                dtype=self.runner.dtype,
                device=self.device,
                tables=tables,
                batch_invariant=bool(self.runner.server_args.enable_deterministic_inference),
            )
            if served.bidirectional and (reason := bidirectional_refusal(self.runner)) is not None:
                raise NotImplementedError(f"--attention-backend attnloom cannot serve this model: {reason}")
            self.layers[layer] = served
        return served

    @property
    def verify_mask(self) -> Any | None:
        """The mask that drafting fills in place."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: the mask is read when the step begins."""

    def support_triton(self) -> bool:
        """Whether SGLang may run Triton kernels beside this backend."""
        return self.device.type != "cpu"

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Begin a step.

        Raises:
            NotImplementedError: for kinds of steps that attnloom does not have.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.step = None
            return
        if mode.is_dllm_extend() or mode.is_prebuilt():
            raise NotImplementedError(f"attnloom does not support steps of the kind {mode.name} yet")
        if mode.is_decode():
            self.begin(self.steps.decode(forward_batch), forward_batch)
        elif mode.is_target_verify():
            mask = self._verify_mask
            step = self.steps.verify(forward_batch, None if mask is None else mask.buffer)
            self.begin(step, forward_batch)
        else:
            self.begin(self.steps.extend(forward_batch), forward_batch)

    def begin(self, step: Step, forward_batch: Any) -> None:
        """Make this step the current one: its layouts are complete then."""
        mapping = getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)
        if mapping is not None:
            step.layouts[Pool.WINDOWED] = self._windowed_layout(
                step, mapping, decode=forward_batch.forward_mode.is_decode()
            )
            if forward_batch.out_cache_loc is not None:
                step.swa_locations = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        self.step = step

    def _windowed_layout(self, step: Step, mapping: Tensor, *, decode: bool) -> BlockSparseLayout:
        if self.windowed is None:
            arguments = self.runner.server_args
            alone = len(set(arguments.get_attention_backends())) == 1 and arguments.disaggregation_mode == "null"
            alone = alone and not arguments.speculative_algorithm
            self.windowed = WindowedSteps(self.steps.table, self._widest_window(), sees_every_step=alone)
        queries = (step.qo_indptr[1:] - step.qo_indptr[:-1]).to(step.kv_lens.device)
        # Both pools are handed out and taken back by the page (compat.page_size).
        page_size = step.layouts[Pool.FULL].block_size
        return self.windowed.layout(step.rows, step.kv_lens, queries, mapping, decode=decode, page_size=page_size)

    def _widest_window(self) -> int:
        """Keys before its own that a query of a layer in the pool of windowed layers may see."""
        reaches = [
            self.max_context_len if served.reach is None else served.reach
            for layer, served in self.layers.items()
            if self._pool(layer) is Pool.WINDOWED
        ]
        return max(reaches, default=self.max_context_len)

    def _pool(self, layer: Any) -> Pool:
        if layer.is_cross_attention:
            return Pool.ENCODER
        mapping = getattr(self.token_to_kv_pool, "layers_mapping", None)
        windowed = mapping is not None and layer.layer_id in mapping and mapping[layer.layer_id][1] is True
        return Pool.WINDOWED if windowed else Pool.FULL

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """A query for each request: see `attend`."""
        return self.attend(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Several queries for a request: see `attend`."""
        return self.attend(*args, **kwargs)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Write the step's keys and values, and compute one layer.

        Args:
            q: ``[tokens, heads * head size]``; rows past the step's queries are padding.
            k: ``[tokens, kv heads, head size]``; None: another layer has written them.
            v: like k.
            layer: the RadixAttention.
            forward_batch: the step, the same that `init_forward_metadata` was given.
            save_kv_cache: False: the model has written them already.
            sinks: ``[heads]``, or None.
            unknown: what SGLang hands to layers that attnloom does not serve; all None.

        Returns:
            ``[tokens, heads * head size]``; padding is 0.
        """
        unknown = {name: value for name, value in unknown.items() if value is not None}
        if unknown:
            raise NotImplementedError(f"attnloom does not support attention layers that are given {', '.join(unknown)}")
        step = self.step
        assert step is not None, "a layer was called before the step began"
        served = self._served(layer)
        if save_kv_cache and k is not None and v is not None:
            self._write(step, layer, forward_batch, k, v)
        pool = self._pool(layer)
        seen = Seen.TREE if step.tree and not served.is_cross else served.seen(extend=step.extend)
        engine = served.engine(seen, sinks=sinks is not None)
        params = served.params(engine, sinks, step.tree if seen is Seen.TREE else {})
        plan = step.plan(pool, served.plan_id(engine), engine, params)

        num_heads, _, head_dim = served.heads
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty(q.shape[0], num_heads * head_dim)
        if q.shape[0] > plan.total_q:
            out[plan.total_q :].zero_()
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        block_size = step.layouts[pool].block_size
        engine.run(
            plan,
            q.view(-1, num_heads, head_dim),
            slot_cache(keys, block_size),
            slot_cache(values, block_size),
            sm_scale=served.scale,
            params=params,
            out=out.view(-1, num_heads, head_dim),
        )
        return out

    def _write(self, step: Step, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        locations = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else forward_batch.out_cache_loc
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(locations, step.swa_locations), k, v)

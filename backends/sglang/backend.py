"""The class that SGLang makes for `--attention-backend attnloom`: steps begin here, and layers are run."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from attnloom import Attention
from attnloom.adapters.token_table import slot_cache
from attnloom.backends.sglang import compat
from attnloom.backends.sglang.layer import Seen, ServedLayer
from attnloom.backends.sglang.step import Pool, Step, Steps
from attnloom.backends.sglang.support import bidirectional_refusal, drafts_trees, refusals
from attnloom.backends.sglang.verified import VerifiedTrees
from attnloom.backends.sglang.windowed import HostWindowedSteps, WindowedSteps
from attnloom.core.serving_options import choice
from attnloom.core.streams import capturing

# Named so that it shows under SGLang's own logging configuration.
logger = logging.getLogger("sglang.attnloom")

_CAPTURED = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")


class AttnloomAttnBackend(AttentionBackend):
    """attnloom as a SGLang attention backend: every step's plans, and every layer's attention.

    A step begins in two halves. `init_forward_metadata_out_graph` writes, at addresses that stay, what may not be read
    while a CUDA graph runs; `init_forward_metadata_in_graph` makes layouts and plans, and is recorded where a graph is
    captured: each replay makes them anew from SGLang's own buffers. Without a graph one follows the other.
    """

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
        self.steps = Steps(table, self.req_to_token_pool.size, page_size)
        self.chosen = choice(getattr(model_runner.model_config.hf_config, "attnloom", None))
        self.layers: dict[Any, ServedLayer] = {}
        self.step: Step | None = None
        # Graphs read what their steps hold.
        self.captured: list[Step] = []
        self.windowed: WindowedSteps | None = None
        self.trees = VerifiedTrees(self.req_to_token_pool.size, self.device)
        # By kind of step and requests, where a graph was captured: where the step's keys go in the windowed pool.
        self._kept_locations: dict[tuple[Any, int], Tensor] = {}
        self._swa_locations: Tensor | None = None
        # Layers that the model was found to have, and whether SGLang will hand sinks over with their calls.
        self._found: list[tuple[Any, ServedLayer, bool]] = []
        self._planned: dict[tuple[bool, bool], list[tuple[Pool, Hashable, Attention, ServedLayer]]] = {}
        self._views: dict[tuple[int, int], tuple[tuple[Any, ...], Tensor, Tensor]] = {}
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
            self._found.append((module, served, sinks))
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
        return compat.verify_mask(self.trees.mask(drafts), self.trees.max_requests)

    def _served(self, layer: Any, name: str = "") -> ServedLayer:
        served = self.layers.get(layer)
        if served is None:
            name = name or f"with layer_id {layer.layer_id}"
            tables = self.chosen.of(name)
            served = ServedLayer(
                name,
                layer,
                dtype=self.runner.dtype,
                kv_dtype=self.runner.kv_cache_dtype,
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
        """Nothing: the mask is read when the step begins, and in a graph by each replay."""

    def support_triton(self) -> bool:
        """Whether SGLang may run Triton kernels beside this backend."""
        return self.device.type != "cpu"

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what a graph reads is made when its shape is captured."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of requests that only fill a captured shape up: the key that they write, in the slot that is nobody's."""
        return 1

    def shared_read_ends(self, mode: Any) -> Any:
        """From SGLang 0.5.18 on: until when a step reads what the scheduler may change. Layers read the token table."""
        graph = mode.is_decode() or mode.is_target_verify()
        return compat.read_to_the_end() if graph else super().shared_read_ends(mode)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a step, and before each capture and replay of one.

        Raises:
            NotImplementedError: for kinds of steps that attnloom does not have, or cannot capture.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.step = None
            return
        if mode.is_dllm_extend() or mode.is_prebuilt():
            raise NotImplementedError(f"attnloom does not support steps of the kind {mode.name} yet")
        if in_capture and mode.name not in _CAPTURED:
            raise NotImplementedError(
                f"attnloom does not support steps of the kind {mode.name} in full CUDA graphs yet"
            )
        if mode.is_target_verify():
            self.trees.stage(forward_batch)
        if (mapping := self.mapping()) is not None:
            self.translate(self.steps.of(forward_batch), mapping, forward_batch)
            self._swa_locations = self._locations(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The step itself. On a GPU nothing is read back, and all of it may be recorded."""
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            return
        step = self.steps.of(forward_batch)
        step.swa_locations = self._swa_locations
        if forward_batch.forward_mode.is_target_verify():
            step.tree = self.trees.params(forward_batch)
        self.begin(step)

    def begin(self, step: Step) -> None:
        """Make this step the current one: its layouts and the plans of the model's layers are complete then."""
        if self.windowed is not None:
            step.layouts[Pool.WINDOWED] = self.windowed.layout(step)
        self.step = step
        for pool, key, engine, served in self._plans_of(step):
            if pool in step.layouts:
                step.plan(pool, key, engine, served.params(engine, None, {} if served.is_cross else step.tree))
        if self.device.type == "cuda" and capturing():
            self.captured.append(step)

    def _plans_of(self, step: Step) -> list[tuple[Pool, Hashable, Attention, ServedLayer]]:
        """One layer for every plan that the model's layers need. Ranges that depend on sinks wait for their layer."""
        kind = (step.extend, bool(step.tree))
        if kind not in self._planned:
            needed: dict[tuple[Pool, Hashable], tuple[Pool, Hashable, Attention, ServedLayer]] = {}
            for layer, served, sinks in self._found:
                engine = served.engine(self._seen(served, step), sinks=sinks)
                if not (sinks and engine.variant.visible):
                    pool, key = self._pool(layer), served.plan_id(engine)
                    needed.setdefault((pool, key), (pool, key, engine, served))
            self._planned[kind] = list(needed.values())
        return self._planned[kind]

    @staticmethod
    def _seen(served: ServedLayer, step: Step) -> Seen:
        return Seen.TREE if step.tree and not served.is_cross else served.seen(extend=step.extend)

    def mapping(self) -> Tensor | None:
        """From a slot of the full pool to one of the windowed layers'; None where they have no pool of their own."""
        return getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)

    def translate(self, step: Step, mapping: Tensor, forward_batch: Any) -> None:
        """Windowed layers have a pool of their own: translate the slots that the step's windows see."""
        if self.windowed is None:
            if self.device.type != "cpu":
                self.windowed = WindowedSteps(self.steps.table, self._widest_window())
            else:
                arguments = self.runner.server_args
                alone = len(set(arguments.get_attention_backends())) == 1 and arguments.disaggregation_mode == "null"
                alone = alone and not arguments.speculative_algorithm
                self.windowed = HostWindowedSteps(self.steps.table, self._widest_window(), sees_every_step=alone)
        self.windowed.translate(step, mapping, decode=forward_batch.forward_mode.is_decode())

    def _locations(self, forward_batch: Any, in_capture: bool) -> Tensor | None:
        """Where the step's keys go in the pool of windowed layers; for a graph, at the address that it was given."""
        if forward_batch.out_cache_loc is None:
            return None
        locations: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        shape = (forward_batch.forward_mode, forward_batch.batch_size)
        kept = self._kept_locations.get(shape)
        if kept is None and in_capture:
            kept = self._kept_locations[shape] = locations
        if kept is None or kept.shape[0] < locations.shape[0]:
            return locations
        # The keys of requests that fill the shape up go to the slot that is nobody's.
        kept[locations.shape[0] :].zero_()
        kept = kept[: locations.shape[0]]
        return kept.copy_(locations)

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
        seen = self._seen(served, step)
        engine = served.engine(seen, sinks=sinks is not None)
        params = served.params(engine, sinks, step.tree if seen is Seen.TREE else {})
        plan = step.plan(pool, served.plan_id(engine), engine, params)

        num_heads, _, head_dim = served.heads
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty(q.shape[0], num_heads * head_dim)
        padding = 0 if step.bound else plan.total_q
        if q.shape[0] > padding:
            out[padding:].zero_()
        keys, values = self._caches(layer, step.layouts[pool].block_size)
        k_scale, v_scale = served.cache_scales(layer)
        engine.run(
            plan,
            q.view(-1, num_heads, head_dim),
            keys,
            values,
            sm_scale=served.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            params=params or None,  # the engine's shortest way is that without
            out=out.view(-1, num_heads, head_dim),
        )
        return out

    def _caches(self, layer: Any, block_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as the engine takes them, the same views as long as they lie there."""
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        place = (keys.data_ptr(), values.data_ptr(), keys.shape, keys.dtype)
        kept = self._views.get((layer.layer_id, block_size))
        if kept is None or kept[0] != place:
            views = slot_cache(keys, block_size), slot_cache(values, block_size)
            kept = self._views[layer.layer_id, block_size] = (place, *views)
        return kept[1], kept[2]

    def _write(self, step: Step, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        locations = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else forward_batch.out_cache_loc
        windowed = step.swa_locations
        if windowed is None and self.mapping() is not None:
            windowed = self.token_to_kv_pool.translate_loc_from_full_to_swa(locations)
        scales: tuple[Any, ...] = ()
        if self.runner.kv_cache_dtype != self.runner.dtype:
            scales = (layer.k_scale, layer.v_scale)  # SGLang divides by them
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(locations, windowed), k, v, *scales)

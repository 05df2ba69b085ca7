"""What attnloom refuses in SGLang: with words that name what was asked for, before anything is computed.

    python -m integration_tests.sglang_cpu.refusals TASK.json RESULT.json

As layers.py.
"""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import torch

from integration_tests.sglang_cpu.checks import refused, run_checks
from integration_tests.sglang_cpu.layers import close, fixture


def check_what_is_refused(case: object) -> None:
    """In words that name what was asked for, before anything is computed."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType

    for words, fields in {
        'logit_capping_method="other"': {"logit_cap": 2.0, "logit_capping_method": "other"},
        "values of another size": {"v_head_dim": 32},
        "use_irope": {"use_irope": True},
        'pos_encoding_mode="ALIBI"': {"pos_encoding_mode": "ALIBI"},
    }.items():
        made = fixture()
        refused(words, lambda made=made, fields=fields: made.run(made.layer(**fields), write=False))
    made = fixture()
    refused("score_mod", lambda: made.run(made.layer(), score_mod=print))
    bidirectional = AttentionType.DECODER_BIDIRECTIONAL
    chunked = fixture(chunked_prefill_size=64)
    refused("--chunked-prefill-size -1", lambda: chunked.run(chunked.layer(attn_type=bidirectional)))
    drafting = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2}
    refused("--speculative-eagle-topk 1", lambda: fixture(enable_deterministic_inference=True, **drafting))
    for words, place, name, value in (
        ("--kv-cache-dtype", "runner", "kv_cache_dtype", torch.float8_e4m3fn),
        ("SGLANG_USE_HND_KVCACHE", "runner.token_to_kv_pool", "use_hnd", True),
        ("(MLA)", "runner.model_config", "attention_arch", AttentionArch.MLA),
        ("unified memory pool", "runner", "token_to_kv_pool_allocator", SimpleNamespace(translate_kv_loc=print)),
    ):
        made = fixture()
        setattr(attrgetter(place)(made), name, value)
        refused(words, lambda made=made: type(made.backend)(made.runner))
    refused("decode context parallelism", lambda: fixture(dcp_size=2))
    refused("--dllm-algorithm", lambda: fixture(dllm_algorithm="any"))
    made = fixture()
    made.run(made.layer())


def check_a_sglang_whose_names_moved(case: object) -> None:
    """Choosing attnloom there stops with the name; SGLang would only log what a plugin raises."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from attnloom.backends.sglang import compat, plugin

    made, needed = fixture(), compat._NEEDED
    try:
        compat._NEEDED = (*needed, ("sglang.srt.layers.radix_attention", "RadixAttention.gone", "it was there"))
        plugin.register()
        refused("RadixAttention.gone is missing", lambda: ATTENTION_BACKENDS["attnloom"](made.runner))
    finally:
        compat._NEEDED = needed
        plugin.register()
    made.backend = ATTENTION_BACKENDS["attnloom"](made.runner)
    close(made.run(made.layer()), made.expected())


if __name__ == "__main__":
    run_checks(globals())

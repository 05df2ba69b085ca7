"""The sm80 family compiles for every architecture it serves, without a spill; a GPU is not needed to know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from attnloom import variants
from attnloom.core.errors import CompilerNotFound
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC, Rendering
from attnloom.core.jit.toolchain import toolchain
from attnloom.core.kernels import attention_spec

VARIANTS = {
    "causal": variants.Causal(),
    "hooks": variants.SoftCap() & variants.Sinks() & variants.PackedMask(),
}


@pytest.mark.parametrize("target", ["80", "90a", "100", "120"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_compiles_without_spills(target: str, variant: str, tmp_path: Path) -> None:
    spec = attention_spec("sm80", torch.bfloat16, 128, 128, VARIANTS[variant], target)
    rendered = spec.sources[0].text
    assert isinstance(rendered, Rendering)
    (tmp_path / "attention.cu").write_text(rendered.text())
    try:
        tools = toolchain("sm80", target)
    except CompilerNotFound as error:
        pytest.skip(str(error))  # a machine without CUDA's compiler builds no CUDA kernel either
    command = [*tools.command, *tools.recipe.compile_flags, "-Xptxas", "-v", "-I", str(CSRC), "-cubin", "-o", "k.cubin"]
    done = subprocess.run([*command, "attention.cu"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", done.stderr)]
    assert spills and set(spills) == {"0"}, done.stderr
    # Two CTAs of 128 threads share the 65536 registers of an SM.
    assert registers and max(registers) <= 256, done.stderr


def test_a_target_is_validated() -> None:
    with pytest.raises(ValueError, match=r"ModuleSpec.target='90a; rm'"):
        ModuleSpec("x", (Source("x.cu", ""),), "sm80", "90a; rm")

"""Other versions of attnloom share a cache; other versions of torch and Python change nothing in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnloom.core.host import host_spec
from attnloom.core.jit import ModuleSpec, build, key
from attnloom.core.jit.key import content_hash, headers, module_key
from attnloom.core.jit.toolchain import toolchain
from tests.core.jit.helpers import ROOT, CountingCompiler, environment, run

# What an engine asks for: the key of an attention module, in a process that has imported torch.
ENGINE_KEY = """
import platform
import torch
if pretend := os.environ.get("PRETEND"):
    torch.__version__ = torch.version.__version__ = pretend
    torch.version.git_version = pretend
    sys.version = platform.python_version = pretend
from attnloom.core.jit.key import content_hash, headers, module_key
from attnloom.core.jit.toolchain import toolchain
from attnloom.core.kernels import attention_spec
from attnloom.core.variants import ALiBi, Causal, SoftCap
made = attention_spec("cpu", torch.bfloat16, 128, 128, Causal() & SoftCap() & ALiBi())
tools = toolchain("cpu")
print(module_key(content_hash(made, headers(made), tools.recipe), tools))
"""


def test_two_versions_of_attnloom_side_by_side(tmp_path: Path) -> None:
    """Each builds its own modules, and neither removes the other's."""
    compiler = CountingCompiler(tmp_path / "compiler")
    cache = tmp_path / "cache"
    old = tmp_path / "old"
    for name in ("core", "csrc"):
        shutil.copytree(ROOT / name, old / "attnloom" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "attnloom" / "__init__.py", old / "attnloom")
    with (old / "attnloom" / "csrc" / "common" / "macros.h").open("a") as header:
        header.write("#define ATTNLOOM_AGE 1\n")
    code = """
text = '#include "common/macros.h"\\n#ifndef ATTNLOOM_AGE\\n#define ATTNLOOM_AGE 2\\n#endif\\n'
text += 'ATTNLOOM_EXPORT int age() { return ATTNLOOM_AGE; }\\n'
print(load(ModuleSpec("probe", (Source("probe.cpp", text),))).age())
"""
    for turn in range(2):
        for root, age in ((old, "1"), (ROOT, "2")):
            assert run(code, environment(cache, root=root, CXX=str(compiler.path))) == age, turn
    assert compiler.count == 2
    assert len(list(cache.glob("probe-*/module.so"))) == 2


def test_another_torch_and_another_python_ask_for_the_same_modules(tmp_path: Path) -> None:
    keys = {run(ENGINE_KEY, environment(tmp_path, PRETEND=pretend)) for pretend in ("", "2.11.0", "9.9.9")}
    assert len(keys) == 1 and len(keys.pop()) == 64


def test_nothing_of_torch_or_python_goes_into_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text that is hashed, read one by one: nothing names a version of either, nor where they lie."""
    hashed: list[str] = []
    add = key._Digest.add

    def recording(self: key._Digest, *texts: str) -> None:
        hashed.extend(texts)
        add(self, *texts)

    monkeypatch.setattr(key._Digest, "add", recording)
    torch = pytest.importorskip("torch")
    from attnloom.core.kernels import attention_spec
    from attnloom.core.variants import ALiBi, Causal, Sinks

    for made in (host_spec(), attention_spec("cpu", torch.float32, 64, 64, Causal() & ALiBi() & Sinks())):
        tools = toolchain(made.family)
        module_key(content_hash(made, headers(made), tools.recipe), tools)
    assert len(hashed) > 50
    told = (torch.__version__, torch.version.git_version, "site-packages", sys.version.split()[0], sys.prefix + "/")
    assert [text for text in hashed if any(word in text for word in told)] == []


def test_the_jit_imports_no_torch(tmp_path: Path) -> None:
    code = "assert load(spec()).answer() == 42; print(*[name for name in sys.modules if name.startswith('torch')])"
    assert run(code, environment(tmp_path / "cache")) == ""


def test_a_module_is_linked_to_nothing_of_torch_or_python() -> None:
    def needed(spec: ModuleSpec) -> set[str]:
        (library,) = build([spec])
        read = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
        return {line.split("[")[1].split(".so")[0] for line in read.splitlines() if "(NEEDED)" in line}

    if shutil.which("readelf") is None:
        pytest.skip("readelf comes with binutils")
    system = {"libc", "libm", "libstdc++", "libgcc_s", "libgomp", "ld-linux-x86-64", "libpthread"}
    assert "libgomp" in needed(host_spec())
    assert needed(host_spec()) <= system

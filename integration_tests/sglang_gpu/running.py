"""The environment of SGLang's processes on a GPU: where they find the plugins of attnloom and of the tests."""

from __future__ import annotations

import os
import tomllib
from importlib import metadata
from pathlib import Path

from integration_tests.running import ROOT

PROBE = ROOT / "integration_tests" / "sglang_cpu" / "plugins"


def plugin_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH in which attnloom's entry points are found, where it runs from a checkout.

    SGLang finds plugins by the metadata of installed distributions. `pip install --target` would leave the same.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "attnloom-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnloom\nVersion: 0\n")
    groups = project["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in groups[group].items()) for group in sorted(groups)]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def environment(folder: Path) -> dict[str, str]:
    """For a process that runs an engine; `folder` is where one may write.

    Modules are compiled once: an engine is three processes, each of which imports SGLang.
    """
    paths = [str(ROOT), str(PROBE)]
    if not any(point.name == "attnloom" for point in metadata.entry_points(group="sglang.srt.plugins")):
        paths.append(str(plugin_folder(folder / "plugin")))
    return {
        "HF_HUB_OFFLINE": "1",
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }

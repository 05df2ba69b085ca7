"""Devices, and the kernel family that serves each."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from attnloom.core.cli.checks.section import Section
from attnloom.core.cli.text import size
from attnloom.core.jit.arch import host_arch


def check() -> Section:
    """The CPU and the GPUs that torch sees."""
    import torch

    section = Section("devices")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    section.facts["cpu"] = (
        f"{_cpu_name()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{size(memory)}; {host_arch().name}; {_family(section, torch.device('cpu'), needed=True)}"
    )
    if host_arch().name == "x86-64":
        section.warning(
            "this processor says nothing of SSE4 or AVX: kernels are compiled for the oldest x86-64",
            "show the guest the host's processor (virtual machines: -cpu host), if it is a virtual one",
        )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        section.facts[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{size(properties.total_memory)}; {_family(section, torch.device('cuda', index), needed=False)}"
        )
    return section


def _family(section: Section, device: object, *, needed: bool) -> str:
    import torch

    from attnloom.core.tiles import family_for

    assert isinstance(device, torch.device)
    try:
        return f"kernel family {family_for(device).name}"
    except ValueError as error:
        if needed:
            section.broken(str(error), "unset ATTNLOOM_FAMILY, or set it to a family of this device")
        return "no kernels for it"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.machine())

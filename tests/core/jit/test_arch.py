"""The processor's features choose an explicit architecture."""

from __future__ import annotations

import pytest

from attnloom.core.jit.arch import arch_of, host_arch

V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("sse2", "x86-64"),
        (V2, "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V3.replace("f16c", ""), "x86-64-v2"),
        (f"{V3} avx512f", "x86-64-v3"),
        (f"{V3} avx512_bf16", "x86-64-v3"),
        (V4, "x86-64-v4"),
        (f"{V4} avx512_bf16", "x86-64-v4+avx512bf16"),
    ],
)
def test_x86_levels(features: str, name: str) -> None:
    arch = arch_of("x86_64", f"processor\t: 0\nmodel name\t: any\nflags\t\t: fpu {features}\n\nprocessor\t: 1\n")
    assert arch.name == name
    assert f"-march={name.partition('+')[0]}" in arch.flags
    assert ("-mavx512bf16" in arch.flags) == ("bf16" in name)


def test_no_cpuinfo_gives_the_baseline() -> None:
    assert arch_of("x86_64", "").flags == ("-march=x86-64",)
    assert arch_of("riscv64", "").flags == ()


def test_arm_machines_differ_by_what_they_list() -> None:
    def arm(features: str, part: str) -> str:
        return arch_of("aarch64", f"Features\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n").name

    names = [arm("fp asimd", "0xd0c"), arm("fp asimd sve", "0xd0c"), arm("fp asimd", "0xd40")]
    assert len(set(names)) == 3
    assert arm("fp asimd", "0xd0c") == names[0]
    assert arch_of("aarch64", "Features\t: fp\n").flags == ("-mcpu=native",)


def test_no_native_flag_where_the_name_is_the_key() -> None:
    assert not any("native" in flag for flag in host_arch().flags) or host_arch().name.startswith("aarch64-")

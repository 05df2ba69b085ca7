"""CUDA kernels compile for every architecture that the family serves, without a spill, and take what they took."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from attnloom.core.errors import CompilerNotFound
from attnloom.core.jit.spec import ModuleSpec
from tests.core.jit import resources
from tests.core.jit.resources import MULTIPROCESSORS, TABLE, ctas_per_sm, instantiations, kernel_name

RENEW = "python -m tests.core.jit.resources --write"
INSTANTIATIONS = list(instantiations())


@pytest.mark.parametrize(
    ("target", "name", "spec"), INSTANTIATIONS, ids=[f"{target}-{name}" for target, name, _ in INSTANTIATIONS]
)
def test_no_spill_and_no_drift(target: str, name: str, spec: ModuleSpec) -> None:
    try:
        compiler = resources.compiler()
    except CompilerNotFound as error:
        pytest.skip(str(error))  # a machine without CUDA's compiler builds no CUDA kernel either
    found = resources.compiled(spec)
    assert found
    spilling = [each for each in found if each.spills]
    assert not spilling
    table = json.loads(TABLE.read_text())
    if table["compiler"] == compiler:  # another compiler allocates other registers
        assert [asdict(each) for each in found] == table["targets"][target][name], f"renew the table: {RENEW}"


def test_the_table_holds_what_is_compiled() -> None:
    held = json.loads(TABLE.read_text())["targets"]
    assert {(target, name) for target, rows in held.items() for name in rows} == {
        (target, name) for target, name, _ in INSTANTIATIONS
    }


def test_nothing_in_the_table_spills_and_all_fits() -> None:
    targets = json.loads(TABLE.read_text())["targets"]
    rows = [row for names in targets.values() for kernels in names.values() for row in kernels]
    assert rows and not [row for row in rows if row["spills"]]
    assert not [row for row in rows if not row["ctas_per_sm"]], "a kernel that fits on no multiprocessor"


def test_how_many_ctas_fit() -> None:
    """As the occupancy calculator has it."""
    hopper = MULTIPROCESSORS["90a"]
    assert ctas_per_sm(hopper, 255, 0, 128) == 2  # registers: 4 warps of 8192
    assert ctas_per_sm(hopper, 128, 100_000, 128) == 2  # shared memory
    assert ctas_per_sm(hopper, 128, 120_000, 128) == 1
    assert ctas_per_sm(hopper, 16, 0, 1024) == 2  # threads
    assert ctas_per_sm(MULTIPROCESSORS["120"], 16, 0, 1024) == 1
    assert ctas_per_sm(hopper, 16, 0, 32) == 32  # CTAs


def test_kernel_names() -> None:
    assert kernel_name("_ZN8attnloom4sm8016attention_kernelINS0_5ShapeI6__halfEEEEvv") == "attention_kernel"
    assert kernel_name("_ZN12_GLOBAL__N_113append_kernelI5uint4EEvN8attnloom12AppendParamsE") == "append_kernel<uint4>"
    fp8 = "_ZN8attnloom12_GLOBAL__N_117append_fp8_kernelI13__nv_bfloat16L26__nv_fp8_interpretation_t1ELi8EEEvNS_3ArgE"
    assert kernel_name(fp8) == "append_fp8_kernel<__nv_bfloat16, 1, 8>"
    assert kernel_name("_ZN12_GLOBAL__N_113append_kernelIhEEvN8attnloom12AppendParamsE") == "append_kernel<uint8>"

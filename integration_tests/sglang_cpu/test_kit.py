"""SGLang's conformance kit passes in full for attnloom."""

from __future__ import annotations

from pathlib import Path

from integration_tests.running import run_program
from integration_tests.sglang_cpu.kit import SLOT_LAYOUTS, VERIFIED
from integration_tests.sglang_cpu.running import environment

DENSE_CASES = 12
WINDOW_CASES = 4
EXTEND_CASES = 9 + 2  # the dense and the windowed ones that are no decode
DECODE_CASES = 3
VERIFY_SHAPES = 5
DRAFT_EXTEND_GRAPHS = 4


def test_every_case_of_the_kit_passes(tmp_path: Path) -> None:
    """Cases run are the cases there are, each on attnloom's kernel, with lengths on the host and without any.

    Those of CUDA graphs run the layer for the capture, for a replay, and but for one kind without a graph before. Pages
    are read as pages, but where the kit tears them apart and in trees of drafts.
    """
    results = run_program("integration_tests.sglang_cpu.kit", [], tmp_path, environment())
    ran = {(result["case"], result["host_lengths"]): result for result in results}
    plain = DENSE_CASES * (1 + len(SLOT_LAYOUTS)) + WINDOW_CASES + 3 * EXTEND_CASES + VERIFY_SHAPES * len(VERIFIED)
    graphs = DECODE_CASES + VERIFY_SHAPES * len(VERIFIED) + DRAFT_EXTEND_GRAPHS
    assert len(ran) == len(results) == 2 * (plain + graphs)
    for (case, _), result in ran.items():
        assert result["outcome"] == "passed", f"{case}: {result['outcome']}"
        expected = 1 if not case.startswith("graph") else 2 if "DRAFT_EXTEND" in case else 3
        assert result["runs"] == expected, f"{case}: attnloom's kernel ran {result['runs']} times"
        assert result["block_sizes"] == [result["block_size"]], case
    assert {result["block_size"] for result in results} == {1, 16, 32}
    seconds = sum(result["seconds"] for result in results)
    assert seconds < 60, f"the kit took {seconds:.0f} s of processor time"

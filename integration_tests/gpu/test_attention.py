"""The engine on a GPU against float64: over two thousand random batches, through every axis at once.

Layout, storage, lengths, groups, head sizes, dtypes, bands, hooks, planners, workers; outputs, unread cache slots and
partial states are poison before a launch.
"""

from __future__ import annotations

import pytest
import torch

from integration_tests.gpu.cases import draw
from integration_tests.gpu.kernels import ALL, ALONE, KERNELS, NAMED, PLAIN, Kernel
from integration_tests.gpu.running import check_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = {**dict.fromkeys(PLAIN, 80), **dict.fromkeys((*ALONE, *ALL), 45), **dict.fromkeys(NAMED, 55)}
"""Batches of each kernel."""


def test_there_are_two_thousand() -> None:
    assert CASES.keys() == set(KERNELS) and sum(CASES.values()) >= 2000


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_random_batches(kernel: Kernel) -> None:
    for index in range(CASES[kernel]):
        check_case(kernel, draw(kernel, index))

"""How many queries a request has at most, as far as the host knows: it decides whether a plan has short tiles only."""

from __future__ import annotations

import random

import pytest
import torch

from attnloom.core.planner import bound_of_longest, longest


@pytest.mark.parametrize("seed", range(20))
def test_offsets_on_the_host(seed: int) -> None:
    draw = random.Random(seed)
    lens = [draw.choice((0, 1, 1, 4, draw.randrange(1, 3000))) for _ in range(draw.randrange(0, 40))]
    offsets = torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    assert longest(offsets) == max(lens, default=0)
    apart = torch.full((len(offsets), 3), -7, dtype=torch.int32)
    apart[:, 1] = offsets
    assert longest(apart[:, 1]) == max(lens, default=0)
    assert longest(offsets[:0]) == 0


def test_offsets_on_a_device_are_not_read() -> None:
    offsets = torch.empty(5, dtype=torch.int32, device="meta")  # four requests
    assert bound_of_longest(offsets, 4, None) == 1
    assert bound_of_longest(offsets, 5, None) == 5
    assert bound_of_longest(offsets, 16, 4) == 4
    assert bound_of_longest(offsets, 4, 3) == 3
    with pytest.raises(ValueError, match="max_q=0: expected at least 1"):
        bound_of_longest(offsets, 4, 0)
    with pytest.raises(TypeError, match=r"max_q=1\.0: expected an int"):
        bound_of_longest(offsets, 4, 1.0)  # type: ignore[arg-type]

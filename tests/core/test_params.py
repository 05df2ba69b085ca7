"""Parameters of a variant on their way to a kernel."""

from __future__ import annotations

import torch

from attnloom import Attention, Param, Variant
from attnloom.core.params import pack, spare_word
from tests.core.problem import make_problem
from tests.core.running import check
from tests.oracle import Band

COLUMNS = 2**24


def test_an_empty_tensor_has_an_address_on_its_device() -> None:
    """torch gives 0, which nothing may read."""
    words = pack([Param("table", torch.int32, (None, None))], [torch.empty(0, 5, dtype=torch.int32)])
    assert list(words) == [spare_word(torch.device("cpu")).data_ptr(), 5, 1, 0, 5]


def test_any_index_of_an_empty_tensor_may_be_asked_for() -> None:
    """`at` reads 0, however far the other indices reach."""
    mask = Variant(
        "test_empty",
        (Param("table", torch.int32, (None, None)),),
        logits_mask=f"return params.table.at(kv_pos, {COLUMNS - 1}) == 0;",
    )
    engine = Attention(4, 2, 64, dtype=torch.float32, variant=mask)
    problem = make_problem([1, 5], [70, 20])
    table = torch.empty(0, COLUMNS, dtype=torch.int32)
    check(engine, problem, problem.answer(Band(None, None)), params={"table": table})

"""What is kept between launches, templates, caches and plans; what was checked is not checked again, all else is."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from attnloom.core.direct import DirectPath
from attnloom.core.looks import Seen
from tests.core.direct.fakes import Engine, Kernel, launch, plan_of, step


def test_a_template_serves_other_tensors_of_the_same_shape(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    first, second = step(), step()
    masked = plan_of(block_kinds=torch.zeros(1, 1, 1, dtype=torch.uint8), positions=True)
    launch(made, first, masked, engine, lse=torch.empty(3, 4), hooks=8)
    plan = plan_of()
    launch(made, second, plan, engine)
    assert len(made._seen.made) == 1
    got = kernel.launched[1]
    assert (got.q.data, got.k.data, got.v.data, got.out.data) == tuple(tensor.data_ptr() for tensor in second)
    assert got.plan == plan.buffer.data_ptr()
    # Nothing of the first launch is left.
    assert not got.lse and not got.hook_params and not got.block_mask.kinds and not got.layout.positions


def test_what_was_checked_is_not_checked_again(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    checked = engine.checks
    assert checked
    for _ in range(3):
        launch(made, (step()[0], k, v, torch.empty_like(out)), plan_of(), engine)
    assert engine.checks == checked
    k_other, v_other = step()[1:3]
    # Layers take turns with their caches.
    for caches in ((k, v), (k_other, v_other)) * 3:
        launch(made, (q, *caches, out), plan_of(), engine)
        got = kernel.launched[-1]
        assert (got.k.data, got.v.data) == tuple(each.data_ptr() for each in caches)
    assert engine.checks == checked


def test_all_that_checks_depend_on_is_checked_anew(path: Callable[[Kernel], DirectPath]) -> None:
    made, engine = path(Kernel()), Engine()
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    others: list[Callable[[], None]] = [
        lambda: launch(made, (q.contiguous(), k, v, out), plan_of(), engine),
        lambda: launch(made, (q[:2], k, v, out), plan_of(), engine),
        lambda: launch(made, (q.double(), k, v, out), plan_of(), engine),
        lambda: launch(made, (q, k.contiguous(), v, out), plan_of(), engine),
        lambda: launch(made, (q, k[:3], v, out), plan_of(), engine),
        lambda: launch(made, (q, k, v.half(), out), plan_of(), engine),
        lambda: launch(made, (q, k, v, torch.empty(3, 4, 128)[..., :64]), plan_of(), engine),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, given=(0.5, 2.0, 4.0)),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, flags=(True, False)),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, flags=(False, True)),
        lambda: launch(made, (q, k, v, out), plan_of(rows=2), engine),
        lambda: launch(made, (q, k, v, out), plan_of(num_workers=3), engine),
    ]
    for other in others:
        before = engine.checks
        other()
        assert engine.checks > before
        other()


def test_numbers_in_tensors_are_read_each_time(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made, scale, tensors, plan = path(kernel), torch.tensor(0.25), step(), plan_of()
    launch(made, tensors, plan, given=(scale, None, None))
    scale.fill_(0.75)
    launch(made, tensors, plan, given=(scale, None, None))
    assert [params.sm_scale for params in kernel.launched] == [0.25, 0.75]
    # Nor is a tensor known by the number that it once held.
    launch(made, tensors, plan, given=(0.75, None, None))
    for value in (0.75, 0.5):
        scale.fill_(value)
        launch(made, tensors, plan, given=(scale, None, None))
    assert [params.sm_scale for params in kernel.launched[2:]] == [0.75, 0.75, 0.5]


def test_zeros_have_signs(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made, tensors, plan = path(kernel), step(), plan_of()
    for scale in (0.0, -0.0, 0.0, -0.0):
        launch(made, tensors, plan, given=(None, None, scale))
    assert [math.copysign(1.0, params.v_scale) for params in kernel.launched] == [1.0, -1.0] * 2


def test_caches_are_known_by_where_they_lie(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    before = engine.checks
    k.data = torch.randn(k.shape)
    launch(made, (q, k, v, out), plan_of(), engine)
    assert engine.checks == before + 1
    assert kernel.launched[1].k.data == k.data_ptr() and kernel.launched[1].k.stride_block == 2048


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.as_strided_(cache.shape, (2048, 64, 1024, 1)),
        lambda cache: cache.transpose_(0, 1),
        lambda cache: cache.resize_(3, 8, 2, 64),
    ],
)
def test_caches_are_known_by_what_they_look_like(
    path: Callable[[Kernel], DirectPath], change: Callable[[torch.Tensor], object]
) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    q, _, v, out = step()
    k = torch.randn(7, 16, 2, 64)
    launch(made, (q, k, v, out), plan_of(), engine)
    before, address = engine.checks, k.data_ptr()
    change(k)
    assert k.data_ptr() == address
    launch(made, (q, k, v, out), plan_of(), engine)
    assert engine.checks == before + 1
    got = kernel.launched[1].k
    assert (got.stride_block, got.stride_slot, got.stride_head) == k.stride()[:3]


def test_scales_are_looked_at_before_they_are_compared(path: Callable[[Kernel], DirectPath]) -> None:
    made, tensors, plan = path(Kernel()), step(), plan_of()
    launch(made, tensors, plan, given=(1.0, None, None))
    with pytest.raises(ValueError, match=r"sm_scale\.device=meta: expected a number"):
        launch(made, tensors, plan, given=(torch.tensor(1.0, device="meta"), None, None))
    seen: list[object] = []

    class Asked(Engine):
        def scales(self, *given: object) -> tuple[float, ...]:
            seen.append(given[0])
            return (1.0, 1.0, 1.0)

    for scale in (1.0, torch.tensor([1.0, 2.0]), True, 1, 1):
        launch(made, tensors, plan, Asked(), given=(scale, None, None))
    assert [type(each) for each in seen] == [torch.Tensor, bool, int]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_what_is_no_dense_tensor_is_refused(path: Callable[[Kernel], DirectPath], name: str) -> None:
    made, plan = path(Kernel()), plan_of()
    tensors = dict(zip(("q", "k_cache", "v_cache", "out"), step(), strict=True))
    launch(made, tuple(tensors.values()), plan)  # type: ignore[arg-type]
    others = {
        r"\.is_nested=True: expected a dense tensor": torch.nested.nested_tensor([*tensors[name]]),
        r"\.layout=torch\.sparse_coo": tensors[name].to_sparse(),
        r"\.is_neg": torch._neg_view(tensors[name]),
        ": expected a tensor with memory": torch._efficientzerotensor(tensors[name].shape),
        ": expected a tensor with memory, got TwoTensor": TwoTensor(tensors[name], tensors[name]),
    }
    for match, other in others.items():
        with pytest.raises(ValueError, match=name + match):
            launch(made, tuple({**tensors, name: other}.values()), plan)  # type: ignore[arg-type]


def test_one_tensor_may_come_twice(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made, (_, k, v, out), plan = path(kernel), step(), plan_of()
    for _ in range(2):
        for tensors in ((out, k, k, out), (out, k, v, out), (out.clone(), v, v, out)):
            launch(made, tensors, plan, engine)
            got = kernel.launched[-1]
            seen = (got.q.data, got.k.data, got.v.data, got.out.data)
            assert seen == tuple(each.data_ptr() for each in tensors)
    assert engine.checks == 1


def test_threads_have_structs_of_their_own(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made, tensors, plan = path(kernel), step(), plan_of()
    for _ in range(2):
        launch(made, tensors, plan, engine)
        thread = threading.Thread(target=launch, args=(made, tensors, plan, engine))
        thread.start()
        thread.join()
    assert engine.checks == 3 and len(kernel.launched) == 4


def test_tensors_of_inference_mode_look_the_same(path: Callable[[Kernel], DirectPath]) -> None:
    made, engine, tensors, plan = path(Kernel()), Engine(), step(), plan_of()
    launch(made, tensors, plan, engine)
    with torch.inference_mode():
        inside = step()
    for each in (inside, tensors) * 2:
        launch(made, each, plan, engine)
    assert engine.checks == 1


def test_no_plan_is_not_the_plan_that_is_gone(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made, tensors = path(kernel), step()
    launch(made, tensors, plan_of(), engine)
    gc.collect()
    before = engine.checks
    with pytest.raises(AttributeError):
        launch(made, tensors, None, engine)  # type: ignore[arg-type]
    assert engine.checks == before + 1 and len(kernel.launched) == 1  # a real engine's check says more


def test_plans_and_caches_are_not_kept_alive(path: Callable[[Kernel], DirectPath]) -> None:
    made, tensors, plan = path(Kernel()), step(), plan_of()
    launch(made, tensors, plan)
    gone = [weakref.ref(each) for each in (plan, *tensors)]
    del tensors, plan
    gc.collect()
    assert [each() for each in gone] == [None] * 5


def test_nothing_piles_up(path: Callable[[Kernel], DirectPath]) -> None:
    made = path(Kernel())
    made._seen = Seen(4)
    kept = []
    for rows in range(1, 20):
        kept.append(step(rows))
        launch(made, kept[-1], plan_of(rows))
        assert len(made._seen.made) <= 4 and len(made._seen.recent) <= 4

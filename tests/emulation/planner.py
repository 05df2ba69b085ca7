"""``python -m tests.emulation.planner LIBRARY SECONDS SEED``: random batches for the emulated device planner.

Until time is up. Its plans must be the host's, word for word. A process of its own, as in check.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import random
import sys
import time

import torch

from attnloom.core.abi import PlanHeader
from attnloom.core.host import host_module
from attnloom.core.plan import Plan
from integration_tests.gpu.planning import Batch, arrays

GUARD, POISON = 64, -1_234_567_890
GPU = torch.device("cuda", 0)  # of the plan's key: nothing lies there


def emulated(module: ctypes.CDLL, batch: Batch, capacity: int, seed: int) -> Plan:
    """The plan that the device planner makes in a room for ``capacity`` tiles, outside of which it writes nothing."""
    given = batch.given("cpu")
    words = given.words_for(capacity)
    buffer = torch.full((words + GUARD,), POISON, dtype=torch.int32)
    scratch = torch.full((capacity + 1 + GUARD,), POISON, dtype=torch.int64)
    params, header = given.params(buffer, scratch=scratch.data_ptr()), given.header(capacity)
    module.emulation_seed(ctypes.c_uint32(seed))
    assert module.run_planner(ctypes.byref(params), ctypes.byref(header)) == 0
    assert bool((buffer[words:] == POISON).all()) and bool((scratch[capacity + 1 :] == POISON).all())
    num_tiles = PlanHeader.from_address(buffer.data_ptr()).num_tiles
    return given.plan(buffer[:words], num_tiles=num_tiles, total_q=batch.total_q, tile_capacity=capacity)


def check(module: ctypes.CDLL, batch: Batch, seed: int) -> None:
    """The plan is the host's."""
    host = batch.host()
    assert torch.equal(arrays(host), arrays(emulated(module, batch, host.tile_capacity, seed)))
    if host.num_tiles:
        check_too_little_room(module, batch, random.Random(seed).randrange(host.num_tiles), seed)


def check_too_little_room(module: ctypes.CDLL, batch: Batch, capacity: int, seed: int) -> None:
    """Without room for the tiles the device's plan is empty, the host says so, and neither writes outside of it."""
    plan = emulated(module, batch, capacity, seed)
    assert plan.num_tiles == 0 and not plan.pieces()
    given = batch.given("cpu")
    words = given.words_for(capacity)
    buffer = torch.full((words + GUARD,), POISON, dtype=torch.int32)
    params, header = given.params(buffer), given.header(capacity)
    assert host_module().attnloom_plan_scan(ctypes.byref(params), ctypes.byref(header)) == -1 - given.num_requests
    assert bool((buffer[words:] == POISON).all())


def short_before_tall() -> Batch:
    """More requests than threads: the tall query tiles, first in the line, are those of the last round of requests."""
    batch = Batch(random.Random(0), GPU)
    batch.qo_lens, batch.slack = [1] * 1100 + [40] * 9, 0
    batch.kv_lens = [100] * len(batch.qo_lens)
    batch.key = batch.key._replace(num_qo_heads=4 * batch.key.num_kv_heads, tile_q_short=16, tile_q=32)
    return batch


def main(library: str, seconds: str, seed: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    module = ctypes.CDLL(library)
    stop = time.monotonic() + float(seconds)
    batch = short_before_tall()
    check(module, batch, int(seed))
    check_too_little_room(module, batch, 45 + 1000, int(seed))  # for its 45 tall tiles and most of a round
    for number in itertools.count(int(seed)):
        batch = Batch(random.Random(number), GPU)
        print(f"seed {number}", flush=True)
        check(module, batch, number)
        if time.monotonic() > stop:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])

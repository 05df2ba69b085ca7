"""A direct path whose device is the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnloom.core import arena, direct
from attnloom.core.direct import DirectPath
from tests.core.direct.fakes import DEVICE, Kernel, Memory


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], DirectPath]:
    monkeypatch.setattr(direct, "current_device", lambda: 0)
    monkeypatch.setattr(direct, "current_stream", lambda index: 77)
    monkeypatch.setattr(direct, "capturing", lambda: False)
    monkeypatch.setattr(direct, "check_plan", lambda engine, plan: engine.check_plan(plan))
    monkeypatch.setattr(direct, "check_run", lambda engine, *_: engine.check_run())
    monkeypatch.setattr(direct, "check_scales", lambda engine, given: engine.scales(*given))
    monkeypatch.setattr(arena, "capturing", lambda: False)
    monkeypatch.setattr(arena, "_arenas", {})
    monkeypatch.setattr(arena, "device_module", lambda device: Memory())
    return lambda kernel: DirectPath("kernel", kernel, DEVICE, 64, (4, 2))  # type: ignore[arg-type]

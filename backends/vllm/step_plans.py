"""The plans of one step, made where they are needed: by the layers, as they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from attnloom.core.plan import Plan

if TYPE_CHECKING:
    from attnloom.backends.vllm.impl import AttnloomImpl

    MakePlan = Callable[[AttnloomImpl, Hashable], Plan]


class StepPlans:
    """A plan for each plan id among a group's layers, made by the first layer that asks.

    vLLM builds a step's metadata outside the graph that it then replays. Layers run inside: what they plan while they
    are captured is planned by every replay, from the lengths that vLLM's buffers hold then, and costs the host nothing.

    Args:
        make: the plan of a layer with a plan id.
        causal: of the step.
    """

    def __init__(self, make: MakePlan, causal: bool) -> None:
        self._make = make
        self._causal = causal
        self._plans: dict[Hashable, Plan] = {}
        self._asked: set[AttnloomImpl] = set()

    def of(self, layer: AttnloomImpl) -> Plan:
        """The plan that the layer is to run."""
        if layer in self._asked:
            # Another pass over the same step, captured perhaps where the one before was not: a graph must make what it
            # reads.
            self._asked.clear()
            self._plans.clear()
        self._asked.add(layer)
        key = layer.plan_id(self._causal)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(layer, key)
        return plan

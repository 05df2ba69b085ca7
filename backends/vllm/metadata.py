"""What a step hands to the layers of one group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata

from attnloom.backends.vllm.step_plans import StepPlans


@dataclass
class AttnloomMetadata(AttentionMetadata):
    """One step of one group of layers.

    Mutable and without slots: vLLM's wrapper layers (cross attention, fast prefill, chunked-local) assign to its fields
    and copy them into subclasses.
    """

    num_actual_tokens: int
    """Query tokens of the step, padding included."""
    causal: bool
    """Whether this step's queries see only keys that are not later than themselves."""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]: the cache slot of each new token, -1 for none."""
    plans: StepPlans
    """A plan for every plan key among the group's layers."""

"""The block-sparse pattern of a step: which KV slots each query tile sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnloom.core.cli.lengths import PREFIX_TOKENS, Lengths

if TYPE_CHECKING:
    from attnloom.core.plan import Plan


@dataclass(frozen=True)
class Stretch:
    """Neighbouring columns of the pattern that a row sees.

    Attributes:
        row: the query tile, in the order of the requests.
        request: whose it is.
        begin, width: KV slots.
        shared: other requests use them too.
    """

    row: int
    request: int
    begin: int
    width: int
    shared: bool


def pattern(step: Lengths, plan: Plan) -> tuple[list[Stretch], int]:
    """What each query tile sees, and the columns in all: the slots of the requests in order, shared prefixes once."""
    ranges, columns = _slots(step)
    group = plan.key.num_qo_heads // plan.key.num_kv_heads
    stretches = []
    # In the plan's line tall query tiles come first, and not request by request.
    tiles = zip(plan.tile_request.tolist(), plan.tile_row.tolist(), plan.tile_rows.tolist(), strict=True)
    for row, (request, first_row, rows) in enumerate(sorted(tiles)):
        kv, past = step.kv[request], step.kv[request] - step.q[request]
        first, last = past + first_row // group, past + (first_row + rows - 1) // group
        begin = 0 if plan.key.left is None else max(0, first - plan.key.left)
        end = kv if plan.key.right is None else min(kv, last + plan.key.right + 1)
        for at, slot, width, shared in ranges[request]:
            low, high = max(begin, at), min(end, at + width)
            if low < high:
                stretches.append(Stretch(row, request, slot + low - at, high - low, shared))
    return stretches, columns


_Range = tuple[int, int, int, bool]
"""Logical position, slot, tokens, whether another request has them too."""


def _slots(step: Lengths) -> tuple[list[list[_Range]], int]:
    used: dict[int, int] = {}
    for names in step.prefixes:
        for name in names:
            used[name] = used.get(name, 0) + 1
    slot_of: dict[int, int] = {}
    columns = 0
    ranges: list[list[_Range]] = []
    for request, kv in enumerate(step.kv):
        found: list[_Range] = []
        at = 0
        for name in step.prefixes[request] if step.prefixes else ():
            if name not in slot_of:
                slot_of[name] = columns
                columns += PREFIX_TOKENS
            shared = used[name] > 1
            if found and found[-1][1] + found[-1][2] == slot_of[name] and found[-1][3] == shared:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + PREFIX_TOKENS, shared)
            else:
                found.append((at, slot_of[name], PREFIX_TOKENS, shared))
            at += PREFIX_TOKENS
        if kv > at:
            found.append((at, columns, kv - at, False))
            columns += kv - at
        ranges.append(found)
    return ranges, columns

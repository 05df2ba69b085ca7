"""The table of what can be translated: names of torch's functions and methods, and what makes the C++ of each."""

from __future__ import annotations

from collections.abc import Callable

from attnloom.core.trace.graph import Node

Operation = Callable[..., Node]
"""Takes the graph, then what torch's function takes, under torch's names."""

OPERATIONS: dict[str, Operation] = {}


def named(*names: str) -> Callable[[Operation], Operation]:
    """Enters a function into the table under each of ``names``."""

    def enter(operation: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, operation))
        return operation

    return enter

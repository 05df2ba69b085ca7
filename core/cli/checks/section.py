"""What a check found: facts, and problems with their remedies."""

from __future__ import annotations

from dataclasses import dataclass, field

Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Problem:
    """Something that does not work, or will not.

    Attributes:
        what: in a sentence.
        remedy: what to do about it.
        broken: attnloom cannot serve; False: it can, but less well than it might.
    """

    what: str
    remedy: str
    broken: bool = True


@dataclass
class Section:
    """What one check found.

    Attributes:
        name: of the check.
        facts: by name, in the order in which they are shown.
        problems: with their remedies.
    """

    name: str
    facts: dict[str, Fact] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def broken(self, what: str, remedy: str) -> None:
        """Note a problem that makes attnloom useless."""
        self.problems.append(Problem(what, remedy))

    def warning(self, what: str, remedy: str) -> None:
        """Note a problem that it can live with."""
        self.problems.append(Problem(what, remedy, broken=False))

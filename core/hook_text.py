"""What the C++ text of a hook says before a compiler reads it: whether it is whole, and what it looks up by what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# In the order in which they are tried; what none of them matches says nothing here.
_PIECE = re.compile(
    r"""
    (?P<skipped> ^[ \t]*\#[^\n]* | //(?:\\\n|[^\n])* | /\*.*?\*/
        | R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
        | [A-Za-z_]\w* | \.?\d(?:'?[\w.])* )
    | (?P<opened> [({\[] )
    | (?P<closed> [)}\]] )
    | (?P<cut> /\* | " | ' | \\\Z )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CLOSES = {")": "(", "}": "{", "]": "["}
_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(if|el)", re.MULTILINE)
_LINE = re.compile(r'^[ \t]*#line[ \t]+(\d+)(?:[ \t]+"([^"\n]*)")?[^\n]*\n', re.MULTILINE)
_ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)([^;]*);")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OF_A_TOKEN = frozenset(("kv_pos", "kv_index"))


def check_whole(text: str, hook: str) -> None:
    """Refuse a text that ends inside a bracket, a string or a comment: a compiler would blame what follows it.

    Args:
        text: of a hook; a ``#line`` in it says where what follows was written.
        hook: names it in the error.

    Raises:
        ValueError: with the hook, and the line that opens or closes too much.
    """
    opened: list[re.Match[str]] = []
    branches = _CONDITIONAL.search(text) is not None
    for piece in _PIECE.finditer(text):
        if piece["cut"]:
            raise ValueError(f"{hook}: {piece['cut']} has no end, {_shown(text, piece)}")
        if branches:
            continue  # one of them is compiled, and each may hold a bracket of its own
        if piece["opened"]:
            opened.append(piece)
        elif piece["closed"]:
            if not opened:
                raise ValueError(f"{hook}: {piece['closed']} closes nothing, {_shown(text, piece)}")
            if opened[-1]["opened"] != _CLOSES[piece["closed"]]:
                open_one = opened[-1]["opened"]
                raise ValueError(f"{hook}: {piece['closed']} stands where {open_one} is open, {_shown(text, piece)}")
            opened.pop()
    if opened:
        raise ValueError(f"{hook}: {opened[-1]['opened']} is not closed, {_shown(text, opened[-1])}")


def _shown(text: str, piece: re.Match[str]) -> str:
    """Where a piece stands, as a compiler says it, and its line."""
    at = piece.start()
    file, begin, number = "line ", 0, 1
    for line in _LINE.finditer(text, 0, at):
        file, begin, number = f"{line[2]}:" if line[2] else file, line.end(), int(line[1])
    whole = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return f"{file}{number + text.count(chr(10), begin, at)}: {whole.strip()}"


def keys_by_column(texts: Iterable[str]) -> bool:
    """Whether the key hooks are fast where a SIMD lane is a token, and not where it is a dimension.

    They are where a parameter, or another element of the key, is looked up by the dimension and nothing by the token:
    such a look-up is then the same for all lanes. It decides about speed alone; what a text hides costs time.
    """
    codes = [_COMMENT.sub("", text) for text in texts]
    by_dim = any(_depends(index, code, {"dim"}) for code in codes for index in _lookups(code) if index != "dim")
    return by_dim and not any(_depends(index, code, _OF_A_TOKEN) for code in codes for index in _lookups(code))


def _lookups(code: str) -> Iterator[str]:
    """The indices of parameters and of the key's elements."""
    for begin in re.finditer(r"\bparams\s*\.\s*\w+\s*(?:\.\s*at\s*)?[\[(]|\bkey\s*\[", code):
        depth, end = 1, begin.end()
        while depth and end < len(code):
            depth += (code[end] in "([") - (code[end] in ")]")
            end += 1
        yield code[begin.end() : end - 1].strip()


def _depends(index: str, code: str, names: Iterable[str]) -> bool:
    """Whether an index holds one of ``names``, or a variable that was made of them."""
    found = set(names)
    made = [(name, set(_WORD.findall(value))) for name, value in _ASSIGNMENT.findall(code)]
    while fresh := {name for name, words in made if words & found} - found:
        found |= fresh
    return not found.isdisjoint(_WORD.findall(index))

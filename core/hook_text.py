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
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)", re.MULTILINE)
# What a compiler reads past, and, so that a quote inside them begins nothing, the names and numbers between.
_UNREAD = re.compile(
    r"""
    (?P<unread> ^[ \t]*\#[ \t]*line\b[^\n]* | //(?:\\\n|[^\n])* | /\*.*?\*/
        | R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | [A-Za-z_]\w* | \.?\d(?:'?[\w.])*
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OF_A_TOKEN = frozenset(("kv_pos", "kv_index"))


def code_of(text: str) -> str:
    """A hook's text without its comments, strings and ``#line``: what names in it are read."""
    return _UNREAD.sub(lambda piece: " " if piece["unread"] else piece[0], text)


def function_body(text: str, place: str) -> str:
    """A hook's text as the rest of a function after its ``{``, the last ``}`` included.

    A compiler that misses something at the end blames the text's last line, and what the text defines ends with it.

    Args:
        text: of a hook.
        place: what errors call a text that has no ``#line`` of its own.
    """
    if not text.lstrip().startswith("#line"):
        text = f'#line 1 "{place}"\n{text}'
    text = text.rstrip()
    file, number = _position(text, len(text))
    names = dict.fromkeys(_DEFINE.findall(code_of(text)))
    last = f'#line {number} "{file}"' if file else f"#line {number}"
    return "\n".join([text, last, "}", *(f"#undef {name}" for name in names)])


def check_whole(text: str, hook: str) -> None:
    """Refuse a text that is empty or ends inside a bracket, a string or a comment: errors would blame what follows it.

    Args:
        text: of a hook; a ``#line`` in it says where what follows was written.
        hook: names it in the error.

    Raises:
        ValueError: with the hook, and the line that opens or closes too much.
    """
    if not code_of(text).strip():
        raise ValueError(f"{hook}: expected C++ such as `return ...;`, got an empty text or comments alone")
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
    file, number = _position(text, at)
    whole = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return f"{f'{file}:' if file else 'line '}{number}: {whole.strip()}"


def _position(text: str, at: int) -> tuple[str, int]:
    """The file, "" if none is named, and the line of a character."""
    file, begin, number = "", 0, 1
    for line in _LINE.finditer(text, 0, at):
        file, begin, number = line[2] or file, line.end(), int(line[1])
    return file, number + text.count("\n", begin, at)


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

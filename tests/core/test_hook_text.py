"""What is read off a hook's C++ text: texts that are cut are refused with the line, and key hooks get their loop."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from attnloom import Variant, variants
from attnloom.core.hook_text import keys_by_column

CUT = {
    "if (q_pos > 3) {\n  return logits;\n": "{ is not closed, mine.logits_transform:1: if (q_pos > 3) {",
    "return logits;\n}": "} closes nothing, mine.logits_transform:2: }",
    "return logits; }\nint more() { return 1;": "} closes nothing, mine.logits_transform:1: return logits; }",
    "\nreturn tanh(logits;": "( is not closed, mine.logits_transform:2: return tanh(logits;",
    "return params.t[q_head);": ") stands where [ is open, mine.logits_transform:1: return params.t[q_head);",
    "return logits; /* half\n * a comment": "/* has no end, mine.logits_transform:1: return logits; /* half",
    'const char* name = "cap;\nreturn logits;': '" has no end, mine.logits_transform:1: const char* name = "cap;',
    "// a\nreturn logits == '{ ? 1.0f : 2.0f;": "' has no end, mine.logits_transform:2: return logits == '{ ?",
    "return logits; \\": "\\ has no end, mine.logits_transform:1: return logits; \\",
    '#line 7 "table.toml"\nfloat x = 1.0f;\nreturn (x;': "( is not closed, table.toml:8: return (x;",
    "#line 12\nreturn (logits;": "( is not closed, line 12: return (logits;",
}
WHOLE = [
    "return logits; // it's {",
    "return logits; // it goes on \\\n with a {\n",
    "/* ( */ return logits;",
    "return 1'000.0f * logits;",
    "return logits + ('\\'' == '{' ? 1.0f : 2.0f);",
    'return logits + float("({"[0]) + float(R"x(}")x"[0]);',
    "#if 1\nif (q_pos > 3) {\n#else\nif (q_pos > 4) {\n#endif\nreturn logits; } return 0.0f;",
    "#pragma message don't\nreturn [&] { return logits; }();",
]


@pytest.mark.parametrize("text", CUT)
def test_a_text_that_is_cut_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Variant("mine", logits_transform=text)
    assert str(caught.value).startswith(f"Variant.logits_transform of mine: {CUT[text]}")


@pytest.mark.parametrize("hook", ["key_transform", "logits_mask", "visible", "sink"])
def test_every_hook_is_looked_at(hook: str) -> None:
    for given in ("return (1;", ("return 1;", "return (1;")):
        with pytest.raises(ValueError, match=rf"Variant\.{hook} of mine: \( is not closed"):
            Variant("mine", **{hook: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", WHOLE)
def test_what_a_bracket_in_a_comment_or_a_string_says_is_no_bracket(text: str) -> None:
    assert Variant("mine", logits_transform=text).texts("logits_transform")[0].endswith(text)


PER_CHANNEL = "return key[dim] * params.scale(kv_head, dim);"
PER_TOKEN = "return key[dim] * params.scale.at(kv_index);"


@pytest.mark.parametrize(
    ("texts", "by_column"),
    [
        (variants.RoPE(64).texts("key_transform"), True),
        (variants.RoPE(64, interleaved=True).texts("key_transform"), True),
        ([PER_CHANNEL], True),
        (["const int partner = dim ^ 1;\nreturn key[partner];"], True),
        (["int at = 0;\nat += dim / 2;\nconst int where = at;\nreturn params.table[where] * key[dim];"], True),
        (["return key[dim] * (dim == 3 ? 2.0f : 1.0f); // key[dim ^ 1]"], False),
        (["return key[dim] * exp(-float(kv_pos));"], False),
        ([PER_TOKEN], False),
        (["return key[dim] + params.embedding(kv_pos, dim);"], False),
        (["const int page = kv_pos / 16;\nreturn key[dim ^ 1] * params.scale[page];"], False),
        ([PER_CHANNEL, PER_TOKEN], False),
        ([PER_CHANNEL, "return key[dim] * 2.0f;"], True),
        ([], False),
    ],
)
def test_the_loop_of_a_key_hook_follows_its_lookups(texts: Iterable[str], by_column: bool) -> None:
    assert keys_by_column(texts) == by_column

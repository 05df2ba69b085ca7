"""Which variants a server's configuration asks for, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnloom.core import serving_options, variants
from attnloom.core.serving import Choice, Table, layer_variant, reads
from attnloom.core.serving_options import choice
from attnloom.core.trace.flex import score_mod
from attnloom.core.variant import Param, Variant

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(12)]


def write(folder: Path, text: str) -> dict[str, str]:
    """The option that names a file with this text."""
    file = folder / "serve.toml"
    file.write_text(text)
    return {"variants": str(file)}


def test_nothing_asked_for() -> None:
    assert choice(None) == Choice() and not Choice().by_layer and Choice().of("any") == ()


def test_a_name_is_for_every_layer() -> None:
    chosen = choice({"variants": "sliding_window(8)"})
    assert not chosen.by_layer
    (table,) = chosen.of("model.layers.0")
    assert table.variant == variants.SlidingWindow(8) and not table.replace


def test_a_file(tmp_path: Path) -> None:
    option = write(
        tmp_path,
        """
        [[variant]]
        use = "soft_cap"
        layers = ["*.layers.1.*", "*.layers.1?.*"]
        params = { logit_cap = 30 }

        [[variant]]
        name = "sigmoid"
        logits_transform = "return sigmoid(logits + params.bias + params.table[kv_pos % 2] + float(params.shift));"
        use_softmax = false
        params = { bias = -2.5, table = [1, 2.0], shift = 3 }
        mode = "replace"
        left = 7
        """,
    )
    chosen = choice(option)
    assert chosen.by_layer
    cap, sigmoid = chosen.tables
    assert [len(chosen.of(layer)) for layer in LAYERS] == [1, 2, *[1] * 8, 2, 2]
    assert cap.variant.captures == {"logit_cap": 30.0} and isinstance(cap.variant.captures["logit_cap"], float)
    assert sigmoid.replace and not sigmoid.variant.use_softmax and sigmoid.variant.left == 7
    assert sigmoid.variant.params == (
        Param("bias"),
        Param("table", shape=(None,)),
        Param("shift", torch.int64),
    )
    table = sigmoid.variant.captures["table"]
    assert isinstance(table, torch.Tensor) and table.tolist() == [1.0, 2.0] and table.dtype == torch.float32
    assert choice(option) is chosen, "layers share the tensors of one file"
    chosen.check_names(LAYERS)


def test_files_are_relative_to_the_toml_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from attnloom import Param, Variant\n"
        "plus = Variant('plus', (Param('by'),), logits_transform='return logits + params.by;', captures={'by': 1.0})\n"
    )
    (table,) = choice(write(tmp_path, '[[variant]]\nuse = "mine.py:plus"\n')).tables
    assert table.variant.captures == {"by": 1.0}
    (table,) = choice(write(tmp_path, '[[variant]]\nuse = "mine.py:plus"\nparams.by = 4.0\n')).tables
    assert table.variant.captures == {"by": 4.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[variant", "expected TOML"),
        ("", r"keys \[\]: expected tables \[\[variant\]\]"),
        ("variant = 3", r"expected tables \[\[variant\]\]"),
        ("other = 1\n[[variant]]\nuse = 'causal'", r"keys \['other', 'variant'\]"),
        ("[[variant]]\nuse = 'causal'\nlayer = '*'", "variant 1: layer: unknown, expected use, layers"),
        ("[[variant]]\nlayers = '*'", "variant 1: use: expected either"),
        ("[[variant]]\nuse = 'causal'\nleft = 1", "variant 1: use: expected either"),
        ("[[variant]]\nuse = 3", "variant 1: use=3"),
        ("[[variant]]\nuse = 'full'\n[[variant]]\nuse = 'no_such'", "variant 2: use: variant 'no_such': no 'no_such'"),
        ("[[variant]]\nuse = 'no_such.py:x'", "variant 1: use: variant .*FileNotFoundError"),
        ("[[variant]]\nuse = 'causal'\nmode = 'or'", "variant 1: mode='or': expected one of and, replace"),
        ("[[variant]]\nuse = 'causal'\nlayers = []", r"variant 1: layers=\[\]"),
        ("[[variant]]\nuse = 'causal'\nlayers = [1]", r"variant 1: layers=\[1\]"),
        ("[[variant]]\nuse = 'causal'\nparams = 3", "variant 1: params=3"),
        ("[[variant]]\nuse = 'soft_cap'\nparams = {cap = 3}", r"params: 'cap' is no parameter of soft_cap, which has"),
        ("[[variant]]\nuse = 'soft_cap'\nparams = {logit_cap = 'x'}", "params.logit_cap='x': expected a number"),
        ("[[variant]]\nuse = 'soft_cap'\nparams = {logit_cap = true}", "params.logit_cap=True: expected a number"),
        ("[[variant]]\nuse = 'alibi'\nparams = {alibi_slopes = 3}", "params.alibi_slopes=3: expected a list"),
        ("[[variant]]\nuse = 'alibi'\nparams = {alibi_slopes = [[1]]}", "expected 1 dimensions"),
        ("[[variant]]\nuse = 'alibi'\nparams = {alibi_slopes = ['x']}", r"alibi_slopes\[0\]='x': expected a number"),
        ("[[variant]]\nlogits_transform = 3", "variant 1: logits_transform=3: expected C"),
        ("[[variant]]\nleft = true", "variant 1: left=True: expected an int"),
        ("[[variant]]\nleft = -1", "variant 1: Variant.left=-1"),
        ("[[variant]]\nname = 'a b'\nleft = 1", "variant 1: Variant.name='a b'"),
        ("variant = []", r"keys \['variant'\]: expected tables \[\[variant\]\], at least one"),
        ("[[variant]]\nleft = 1\nparams = {float = 1.0}", "variant 1: params.float: Param.name='float': expected"),
        ("[[variant]]\nleft = 1\nparams = {'my-bias' = [1.0]}", "variant 1: params.my-bias: Param.name='my-bias': exp"),
        ("[[variant]]\nleft = 1\nparams = {x = 'y'}", "params.x='y': expected a number"),
        (
            "[[variant]]\nuse = 'soft_cap'\nparams = {logit_cap = 0}",
            "params.logit_cap=0.0: expected a finite number above 0",
        ),
        ("[[variant]]\nuse = 'soft_cap'\nparams = {logit_cap = inf}", "params.logit_cap=inf: expected a finite number"),
        ("[[variant]]\nuse = 'chunked_local(64)'\nparams = {chunk_size = 8}", "params.chunk_size=8: expected 64"),
        ("[[variant]]\nuse = 'packed_mask'", "variant 1: packed_mask reads request"),
        ("[[variant]]\nlogits_transform = 'return q_index;'", "variant 1: custom reads q_index"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        choice(write(tmp_path, text))
    assert str(raised.value).startswith(str(tmp_path / "serve.toml"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(0)", "importing theirs.py: SystemExit: 0"),
        ("def made(): raise KeyError('zap')", "calling made: KeyError: 'zap'"),
    ],
)
def test_code_that_a_file_names_may_fail_in_any_way(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "theirs.py").write_text(code)
    with pytest.raises(ValueError, match=message) as raised:
        choice(write(tmp_path, "[[variant]]\nuse = 'theirs.py:made'"))
    assert str(raised.value).startswith(f"{tmp_path / 'serve.toml'}: variant 1: use: ")


@pytest.mark.parametrize("option", [[], "causal", {}, {"variants": 3}, {"variants": "causal", "more": 1}])
def test_what_is_no_option(option: object) -> None:
    with pytest.raises(ValueError, match=r'expected {"variants": a TOML file or the name of a variant}'):
        choice(option)


def test_a_missing_file_and_a_wrong_name() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such.toml"):
        choice({"variants": "no_such.toml"})
    with pytest.raises(ValueError, match="no 'no_such' in the catalogue"):
        choice({"variants": "no_such"})


NUMBERS = """
import torch
from attnloom import Param, Variant
v = Variant(
    "v",
    (
        Param("d", torch.int32, (None,)),
        Param("u", torch.uint8, (None,)),
        Param("b", torch.bool, (None,)),
        Param("f", torch.float32, (None,)),
        Param("bias"),
        Param("n", torch.int64),
    ),
    logits_transform="return logits;",
)
"""


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("d = [1, 1.5]", r"params.d\[1\]=1.5: expected an int"),
        ("d = [2147483648]", r"params.d\[0\]=2147483648: expected -2147483648 to 2147483647, the numbers of int32"),
        ("d = [nan]", r"params.d\[0\]=nan: expected an int"),
        ("d = [[1], [2, 3]]", r"params.d=\[\[1\], \[2, 3\]\]: expected a list of numbers, or of lists"),
        ("d = [" + "[" * 100 + "1" + "]" * 100 + "]", r"params.d=.*: expected a list of numbers"),
        ("u = [-1]", r"params.u\[0\]=-1: expected 0 to 255, the numbers of uint8"),
        ("u = [true]", r"params.u\[0\]=True: expected an int"),
        ("b = [1]", r"params.b\[0\]=1: expected true or false"),
        ("f = [1e39]", r"params.f\[0\]=1e\+39: expected a float32"),
        ("f = [true]", r"params.f\[0\]=True: expected a number"),
        ("bias = -1e39", r"params.bias=-1e\+39: expected a float32"),
        ("n = 9223372036854775808", "params.n=9223372036854775808: expected -9223372036854775808 to"),
    ],
)
def test_numbers_that_a_parameter_does_not_have(tmp_path: Path, params: str, message: str) -> None:
    (tmp_path / "numbers.py").write_text(NUMBERS)
    with pytest.raises(ValueError, match=message) as raised:
        choice(write(tmp_path, f"[[variant]]\nuse = 'numbers.py:v'\nparams = {{ {params} }}"))
    assert str(raised.value).startswith(f"{tmp_path / 'serve.toml'}: variant 1: params.")


def test_numbers_that_a_parameter_has(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(NUMBERS)
    given = "d = [-2147483648], u = [255], b = [true], f = [1, -inf, 1e38], bias = inf, n = 9223372036854775807"
    (table,) = choice(write(tmp_path, f"[[variant]]\nuse = 'numbers.py:v'\nparams = {{ {given} }}")).tables
    found = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in table.variant.captures.items()
    }
    assert found.pop("f") == [1.0, float("-inf"), pytest.approx(1e38)]
    assert found == {"d": [-(2**31)], "u": [255], "b": [True], "bias": float("inf"), "n": 2**63 - 1}


def test_whatever_is_wrong_with_a_table_is_said_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_options, "_patterns", lambda place, table: {}["zap"])
    with pytest.raises(ValueError, match=r"serve.toml: variant 1: KeyError: 'zap'"):
        choice(write(tmp_path, "[[variant]]\nuse = 'causal'"))


def test_a_file_that_is_nested_deeply(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serve.toml: nested too deeply"):
        choice(write(tmp_path, "[[variant]]\nuse = 'causal'\nparams = {x = " + "[" * 9000 + "]" * 9000 + "}"))


def test_an_int_of_a_hook_is_an_int64(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"variant 1: params.x=99999999999999999999: expected -9223372036854775808 to"):
        choice(write(tmp_path, "[[variant]]\nlogits_transform = 'return logits;'\nparams = {x = 99999999999999999999}"))


def test_a_pattern_that_names_no_layer() -> None:
    chosen = Choice((Table("a.toml: variant 1", variants.Full(), ("*.layers.1.*", "*.layer.2.*")),))
    with pytest.raises(ValueError, match=r"a.toml: variant 1: layers: '\*.layer.2.\*' matches none of"):
        chosen.check_names(LAYERS)


def test_what_a_hook_reads() -> None:
    def by_head(score: torch.Tensor, b: object, h: torch.Tensor, q_idx: object, kv_idx: object) -> torch.Tensor:
        return score * (h + 1)

    def by_request(score: torch.Tensor, b: torch.Tensor, h: object, q_idx: object, kv_idx: object) -> torch.Tensor:
        return score * b

    assert reads(score_mod(by_head), ("request", "q_head")) == "q_head"
    with pytest.raises(ValueError, match="here: by_request reads request"):
        Table("here", score_mod(by_request))
    assert reads(Variant("v", logits_transform="// request\nreturn 2.0f * logits;"), ("request",)) == ""
    with pytest.raises(ValueError, match="here: by_head reads q_head, which is not supported under tensor parallelism"):
        Choice((Table("here", score_mod(by_head)),)).check_one_rank()
    Choice((Table("here", variants.SoftCap()),)).check_one_rank()


SIGMOID = Variant("sigmoid", logits_transform="return sigmoid(logits);", use_softmax=False)


def test_what_a_layer_computes() -> None:
    window, cap = variants.SlidingWindow(8), variants.SoftCap()
    assert layer_variant(window, cap, ()) == window & cap
    both = layer_variant(window, cap, (Table("here", SIGMOID),))
    assert (both.left, both.right, both.use_softmax) == (7, 0, False)
    assert len(both.texts("logits_transform")) == 2 and both.params == cap.params
    alone = layer_variant(window, cap, (Table("here", SIGMOID, replace=True),))
    assert (alone.left, alone.right) == (7, 0)
    assert alone.texts("logits_transform") == SIGMOID.texts("logits_transform") and not alone.params
    with pytest.raises(ValueError, match=r"here: .*the sink of .*; or mode = \"replace\""):
        layer_variant(window, variants.Sinks(), (Table("here", SIGMOID),))

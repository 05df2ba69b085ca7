"""Reads which variants a server's configuration asks for.

The option is an object with one key, ``variants``: a TOML file, or a variant as :mod:`attnloom.core.named` names it.
Every table of the file that matches a layer's name acts on it, in the order of the file:

    [[variant]]
    use = "soft_cap"                            # a name; or hooks: logits_transform = "return ...;"
    layers = ["*.layers.0.*", "*.layers.2.*"]   # default: every layer
    params = { logit_cap = 30.0 }               # numbers, or lists of them
    mode = "and"                                # "replace": without the soft cap, ALiBi and sinks of the layer itself
"""

from __future__ import annotations

import ctypes
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnloom.core.errors import shown
from attnloom.core.named import parse_variant
from attnloom.core.params import Value, check_fixed, check_range
from attnloom.core.serving import EVERY_LAYER, Choice, Table
from attnloom.core.variant import HOOKS, Param, Variant

# Keys of a table that say what a variant of its own is, with their types.
_OWN: dict[str, tuple[type, str]] = {
    "name": (str, "an identifier"),
    **{hook: (str, "C++ text") for hook in HOOKS},
    "use_softmax": (bool, "true or false"),
    "left": (int, "an int"),
    "right": (int, "an int"),
}
_KEYS = ("use", "layers", "params", "mode", *_OWN)
_MODES = ("and", "replace")
_MOST_DIMENSIONS = 8


def choice(option: object) -> Choice:
    """What the option asks for.

    Args:
        option: as a framework hands it on; None: nothing was asked for.

    Raises:
        ValueError: something in it cannot be read or served; the message names the file, the table and the key.
        OSError: the file cannot be read.
    """
    if option is None:
        return Choice()
    if not isinstance(option, Mapping) or set(option) != {"variants"} or not isinstance(option["variants"], str):
        raise ValueError(f'attnloom={option!r}: expected {{"variants": a TOML file or the name of a variant}}')
    named: str = option["variants"]
    if named.endswith(".toml"):
        path = Path(named).expanduser().resolve()
        return _read(path, path.read_bytes())
    return _named(named)


@functools.lru_cache(maxsize=8)
def _named(text: str) -> Choice:
    return Choice((Table(f"attnloom.variants={text!r}", parse_variant(text)),))


@functools.lru_cache(maxsize=8)
def _read(path: Path, content: bytes) -> Choice:
    """Once a process for the same file: its layers then share the tensors that hooks read, and plans."""
    try:
        document = tomllib.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: {error}: expected TOML") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply: expected tables [[variant]]") from None
    tables = document.get("variant")
    if (
        set(document) != {"variant"}
        or not isinstance(tables, list)
        or not tables
        or not all(isinstance(t, dict) for t in tables)
    ):
        raise ValueError(
            f"{path}: keys {sorted(document)}: expected tables [[variant]], at least one, and nothing else"
        )
    return Choice(tuple(_placed(f"{path}: variant {n}", table, path.parent) for n, table in enumerate(tables, start=1)))


def _placed(place: str, table: Mapping[str, object], folder: Path) -> Table:
    """A table; whatever is wrong with it is said with its place."""
    try:
        return _table(place, table, folder)
    except Exception as error:
        if str(error).startswith(place):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{error}") from error


def _table(place: str, table: Mapping[str, object], folder: Path) -> Table:
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise ValueError(f"{place}: {unknown[0]}: unknown, expected {', '.join(_KEYS)}")
    own = {key: table[key] for key in _OWN if key in table}
    if ("use" in table) == bool(own):
        raise ValueError(f"{place}: use: expected either `use`, which names a variant, or hooks of its own")
    values = table.get("params", {})
    if not isinstance(values, dict):
        raise ValueError(f"{place}: params={values!r}: expected a table of numbers")
    mode = table.get("mode", "and")
    if mode not in _MODES:
        raise ValueError(f"{place}: mode={mode!r}: expected one of {', '.join(_MODES)}")
    variant = _of_hooks(place, own, values) if own else _used(place, table["use"], folder)
    captures = dict(variant.captures)
    declared = {param.name: param for param in variant.params}
    for name, value in values.items():
        if name not in declared:
            raise ValueError(f"{place}: params: {name!r} is no parameter of {variant.name}, which has {[*declared]}")
        captures[name] = _value(f"{place}: params.{name}", declared[name], value)
        check_fixed(f"{place}: params.{name}", declared[name], captures[name], variant.captures)
    return Table(place, replace(variant, captures=captures), _patterns(place, table), mode == "replace")


def _used(place: str, named: object, folder: Path) -> Variant:
    if not isinstance(named, str):
        raise ValueError(f"{place}: use={named!r}: expected the name of a variant")
    try:
        return parse_variant(named, folder)
    except Exception as error:  # whatever the code that is named there raises
        raise ValueError(f"{place}: use: {error}") from error


def _of_hooks(place: str, own: Mapping[str, object], values: Mapping[str, object]) -> Variant:
    """A variant whose hooks are text in the file; its parameters are what `params` gives values for."""
    for key, value in own.items():
        kind, expected = _OWN[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{place}: {key}={value!r}: expected {expected}")
    params = tuple(_declared(f"{place}: params.{name}", name, value) for name, value in values.items())
    arguments: dict[str, Any] = {"name": "custom", **own}
    try:
        return Variant(params=params, **arguments)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _declared(place: str, name: str, value: object) -> Param:
    """An int is an int64, any other number a float32, a list a float32 tensor."""
    shape = (None,) * _numbers(place, value, torch.float32).dim() if isinstance(value, list) else ()
    try:
        return Param(name, torch.int64 if isinstance(value, int) else torch.float32, shape)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _value(place: str, param: Param, value: object) -> Value:
    if not param.scalar:
        tensor = _numbers(place, value, param.dtype)
        if tensor.dim() != len(param.shape):
            raise ValueError(f"{place}={value!r}: expected {len(param.shape)} dimensions")
        return tensor
    number = _number(place, value, param.dtype)
    check_range(place, param, number)
    return number


def _numbers(place: str, value: object, dtype: torch.dtype) -> Tensor:
    shape = _shape(value)
    if not shape:
        raise ValueError(f"{place}={shown(value)}: expected a list of numbers, or of lists of one length")
    return torch.tensor(_converted(place, value, dtype), dtype=dtype).reshape(shape)


def _shape(value: object) -> tuple[int, ...]:
    """Of lists of lists; () where it is no list, or its lists differ in length, or lie deeper than any shape."""
    shape: tuple[int, ...] = ()
    level = [value]
    while all(isinstance(each, list) for each in level) and level and len(shape) < _MOST_DIMENSIONS:
        lengths = {len(each) for each in level if isinstance(each, list)}
        if len(lengths) != 1:
            return ()
        shape += (lengths.pop(),)
        level = [item for each in level if isinstance(each, list) for item in each]
    return () if any(isinstance(each, list) for each in level) else shape


def _converted(place: str, value: object, dtype: torch.dtype) -> list[Any] | bool | float:
    if isinstance(value, list):
        return [_converted(f"{place}[{index}]", each, dtype) for index, each in enumerate(value)]
    return _number(place, value, dtype)


def _number(place: str, value: object, dtype: torch.dtype) -> bool | int | float:
    """A number of a file, unchanged: one that the type does not have is an error, and not its nearest neighbour.

    Decimals become the nearest float32, and inf and nan are what they say.
    """
    if dtype == torch.bool:
        if not isinstance(value, bool):
            raise ValueError(f"{place}={shown(value)}: expected true or false")
        return value
    floating = dtype.is_floating_point
    if isinstance(value, bool) or not isinstance(value, int | float if floating else int):
        raise ValueError(f"{place}={shown(value)}: expected {'a number' if floating else 'an int'}")
    if floating:
        try:
            number = float(value)
        except OverflowError:  # an int
            number = math.inf
        if math.isinf(ctypes.c_float(number).value) and value not in (math.inf, -math.inf):
            raise ValueError(f"{place}={shown(value)}: expected a float32, which is at most 3.4e38")
        return number
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not least <= value <= most:
        raise ValueError(f"{place}={shown(value)}: expected {least} to {most}, the numbers of {str(dtype)[6:]}")
    return int(value)


def _patterns(place: str, table: Mapping[str, object]) -> tuple[str, ...]:
    layers = table.get("layers", [*EVERY_LAYER])
    patterns = layers if isinstance(layers, list) else [layers]
    texts = tuple(pattern for pattern in patterns if isinstance(pattern, str) and pattern)
    if not texts or len(texts) != len(patterns):
        raise ValueError(f"{place}: layers={layers!r}: expected names of layers, which may hold * and ?")
    return texts

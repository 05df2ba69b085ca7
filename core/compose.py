"""Composition of variants: ``a & b``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from attnloom.core.errors import AttnloomError
from attnloom.core.hook_text import code_of
from attnloom.core.variant import HOOKS, Param, Variant, same_value

_GAP = r"(?:\s|//[^\n]*\n|/\*.*?\*/)*"
_OTHER_USE = re.compile(r"\bparams\b(?!\s*\.\s*\w)")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b", re.MULTILINE)


class CompositionError(AttnloomError, ValueError):
    """Two variants whose composition has no meaning; the message says why."""


def compose(first: Variant, second: Variant) -> Variant:
    """The variant that both make together: hooks act left to right, masks and bands intersect.

    Raises:
        CompositionError: they have no composition.
    """
    first, second = _with_names_of_their_own(first, second)
    pair = f"{first.name} & {second.name}"
    for variant, rest in ((first, second), (second, first)):
        if variant.sink and not rest.use_softmax:
            raise CompositionError(
                f"{pair}: the sink of {variant.name} joins the softmax's sum, and {rest.name} uses none"
            )
    if first.sink and second.sink:
        raise CompositionError(f"{pair}: both have a sink, expected one")
    if not (first.use_softmax or second.use_softmax) and first.logits_transform:
        raise CompositionError(f"{pair}: both make weights of the logits, expected one")
    if not first.use_softmax and first.logits_transform and second.logits_transform:
        raise CompositionError(
            f"{pair}: {first.name} makes weights of the logits and {second.name} changes logits, which comes first: "
            f"write {second.name} & {first.name}"
        )
    hooks = {hook: first.texts(hook) + second.texts(hook) for hook in HOOKS}
    if any(variant.logits_mask and not variant.mask_free for variant in (first, second)):
        hooks["mask_free"] = ()  # one of the masks may hide any key
    return Variant(
        name=f"{first.name}_{second.name}"[:64],
        params=tuple({param.name: param for param in (*first.params, *second.params)}.values()),
        use_softmax=first.use_softmax and second.use_softmax,
        left=_narrower(first.left, second.left),
        right=_narrower(first.right, second.right),
        captures={**first.captures, **second.captures},
        kernel_names=first.kernel_names + second.kernel_names,
        **hooks,
    )


def _with_names_of_their_own(first: Variant, second: Variant) -> tuple[Variant, Variant]:
    """Both variants, a parameter renamed where one name stands for two values.

    Parameters that run() is given are shared by name; values that a variant brings along are its own.
    """
    for name in [param.name for param in second.params if _declared(first, param.name)]:
        owned = [name in variant.captures for variant in (first, second)]
        if owned == [True, True] and same_value(first.captures[name], second.captures[name]):
            continue
        if owned == [False, False]:
            one, other = _declared(first, name), _declared(second, name)
            if one != other:
                raise CompositionError(
                    f"{first.name} & {second.name}: parameter {name!r} is declared as {one} and {other}"
                )
            continue
        taken = {param.name for param in (*first.params, *second.params)}
        fresh = next(new for number in range(2, len(taken) + 3) if (new := f"{name}_{number}") not in taken)
        if owned[1]:
            second = _renamed(second, name, fresh)
        else:
            first = _renamed(first, name, fresh)
    return first, second


def _declared(variant: Variant, name: str) -> Param | None:
    return next((param for param in variant.params if param.name == name), None)


def _renamed(variant: Variant, old: str, new: str) -> Variant:
    """The variant with another name for a parameter.

    Raises:
        CompositionError: a text does more with ``params`` than reading members by name, so uses may go unseen.
    """
    use = re.compile(rf"\bparams({_GAP}\.{_GAP}){old}\b", re.DOTALL)
    changes: dict[str, Any] = {}
    for hook in HOOKS:
        for text in variant.texts(hook):
            code = code_of(text)
            if re.search(r"\bparams\b", code) and (_OTHER_USE.search(code) or _DEFINE.search(code)):
                raise CompositionError(
                    f"parameter {old!r} of {variant.name} stands for another value in what it is composed with, and "
                    f"cannot be renamed in {hook}: expected params.{old} and the like as the only uses of params, "
                    f"without #define, or another name for {old}"
                )
        changes[hook] = tuple(use.sub(rf"params\1{new}", text) for text in variant.texts(hook))
    changes["params"] = tuple(replace(param, name=new) if param.name == old else param for param in variant.params)
    changes["captures"] = {new if name == old else name: value for name, value in variant.captures.items()}
    return replace(variant, **changes)


def _narrower(a: int | None, b: int | None) -> int | None:
    bounds = [bound for bound in (a, b) if bound is not None]
    return min(bounds) if bounds else None

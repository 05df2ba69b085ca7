"""The cache key: a hash of everything that decides what a module does, and of nothing else.

Contents, never file times or paths: a touched file, a fresh checkout and a moved cache all still hit.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC
from attnloom.core.jit.toolchain import Recipe, Toolchain

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w.*))', re.MULTILINE)


def content_hash(spec: ModuleSpec, reached: Mapping[str, str], recipe: Recipe) -> str:
    """Hash of what is compiled and how: sources, the headers they reach, flags, architecture.

    Two compilers that follow one recipe make modules of the same content; this finds a module when there is no
    compiler to ask for its identity.

    Args:
        spec: the module.
        reached: what :func:`headers` gives for it.
        recipe: how its family is compiled.
    """
    digest = _Digest()
    digest.add(spec.family, recipe.arch, *recipe.compile_flags, "link", *recipe.link_flags)
    for source in spec.sources:
        # A template and its context stand for what they render to.
        texts = _texts(source)
        digest.add(source.name, "" if isinstance(source.text, str) else source.text.context, str(len(texts)))
        for name, text in texts.items():
            digest.add(name, text)
    for name, text in sorted(reached.items()):
        digest.add(name, text)
    return digest.hex()


def module_key(content: str, toolchain: Toolchain) -> str:
    """The key of a module: its content (see :func:`content_hash`) and the compiler that builds it."""
    digest = _Digest()
    digest.add(content, toolchain.identity)
    return digest.hex()


def headers(spec: ModuleSpec) -> dict[str, str]:
    """Every header under csrc/ that the sources of ``spec`` reach, as {path relative to csrc/: text}.

    Comments and conditions are not read: a header too many costs a rebuild. One too few cannot happen, because a build
    sees copies of these files and no other folder of the package.

    Raises:
        ValueError: an include names its file through a macro, which cannot be followed.
    """
    own = {source.name for source in spec.sources}
    found: dict[str, str] = {}
    # (text, folder its relative includes are looked up in: None is the build folder, which holds only `own`)
    todo: list[tuple[str, str, Path | None]] = [
        (name, text, None) for source in spec.sources for name, text in _texts(source).items()
    ]
    while todo:
        owner, text, folder = todo.pop()
        for match in _INCLUDE.finditer(text):
            quoted, system, computed = match.groups()
            if computed:
                raise ValueError(f'{owner}: #include {computed}: expected "file" or <file>, a macro cannot be followed')
            if quoted and folder is None and quoted in own:
                continue
            path = _resolve(quoted or system, folder if quoted else None)
            if path is None:
                continue  # a header of the compiler, which its identity stands for
            name = os.path.relpath(path, CSRC)
            if name not in found:
                found[name] = path.read_text(encoding="utf-8")
                todo.append((name, found[name], path.parent))
    return found


def ingredients(spec: ModuleSpec, reached: Mapping[str, str]) -> dict[str, str]:
    """What a module is made of under csrc/, as {path relative to csrc/: :func:`fingerprint` of the file}.

    Kept beside the module: what differs in them was built by other sources than ours.

    Args:
        spec: the module.
        reached: what :func:`headers` gives for it.
    """
    texts = dict(reached)
    for source in spec.sources:
        if isinstance(source.text, str):
            same = (path for path in CSRC.rglob(source.name) if path.read_text(encoding="utf-8") == source.text)
            texts |= {path.relative_to(CSRC).as_posix(): source.text for path in same}
        else:
            texts |= source.text.ingredients()
    return {name: fingerprint(text) for name, text in sorted(texts.items())}


def fingerprint(text: str) -> str:
    """A short hash of a file's content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _texts(source: Source) -> dict[str, str]:
    """What there is to read of a source without rendering it."""
    if isinstance(source.text, str):
        return {source.name: source.text}
    return dict(sorted(source.text.ingredients().items()))


def _resolve(include: str, folder: Path | None) -> Path | None:
    for root in (folder, CSRC):
        if root is not None:
            path = Path(os.path.normpath(root / include))
            if path.is_relative_to(CSRC) and path.is_file():
                return path
    return None


class _Digest:
    """sha256 over a list of texts; lengths go in too, so that no two lists look the same."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, *texts: str) -> None:
        for text in texts:
            data = text.encode()
            self._sha.update(len(data).to_bytes(8, "little"))
            self._sha.update(data)

    def hex(self) -> str:
        return self._sha.hexdigest()

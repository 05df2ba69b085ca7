"""The arrow is backends -> adapters -> core -> csrc, never back, and frameworks are known to their backend alone.

Read from the syntax trees of the whole tree, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("core", "adapters", "backends")
FRAMEWORKS = ("vllm", "sglang")
BESIDE = ("tests", "integration_tests", "benchmarks")
PUBLIC = "attnloom/__init__.py"


def imports(text: str) -> Iterator[str]:
    """Every module that a file imports, in full: ``from attnloom.core import plan`` gives attnloom.core.plan."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def broken(path: str, text: str) -> list[str]:
    """The imports of the file at ``path`` (relative to the root) that point the wrong way."""
    parts = path.split("/")
    layer = LAYERS.index(parts[0])
    framework = parts[1] if parts[0] == "backends" and len(parts) > 2 else ""
    wrong = []
    for module in imports(text):
        words = module.split(".")
        if words[0] in LAYERS:
            wrong.append(module)  # a second copy of the module, under another name
        elif words[0] == "attnloom":
            # The public names are core's, for all who are above it.
            target = LAYERS.index(words[1]) if len(words) > 1 and words[1] in LAYERS else LAYERS.index("core")
            public = len(words) < 2 or words[1] not in LAYERS
            other_framework = len(words) > 2 and words[2] in FRAMEWORKS and words[2] != framework
            if target > layer or (public and layer == 0) or other_framework:
                wrong.append(module)
        elif words[0] in {*FRAMEWORKS, *BESIDE} - {framework}:
            wrong.append(module)
    return wrong


def files() -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    return sorted(found)


@pytest.mark.parametrize("path", files())
def test_imports_follow_the_arrow(path: str) -> None:
    assert broken(path, (ROOT / path).read_text()) == []


def test_every_layer_was_looked_at() -> None:
    for layer in LAYERS:
        assert sum(path.startswith(f"{layer}/") for path in files()) >= 2


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/a.py", "import attnloom.adapters.page_table"),
        ("core/a.py", "from attnloom.backends.vllm import plugin"),
        ("core/a.py", "from attnloom import adapters"),
        ("core/a.py", "from attnloom import Attention"),
        ("core/a.py", "def f():\n    import vllm.config"),
        ("core/a.py", "import importlib\nimportlib.import_module('attnloom.adapters')"),
        ("core/a.py", "import core.plan"),
        ("core/a.py", "from tests.oracle import attention"),
        ("adapters/a.py", "from attnloom.backends import vllm"),
        ("adapters/a.py", "import sglang"),
        ("backends/vllm/a.py", "import sglang"),
        ("backends/vllm/a.py", "from attnloom.backends.sglang import b"),
        ("backends/shared.py", "import vllm"),
    ],
)
def test_a_wrong_arrow_is_seen(path: str, text: str) -> None:
    assert len(broken(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/a.py", "import torch\nfrom attnloom.core.plan import Plan\nfrom attnloom.core import errors"),
        ("adapters/a.py", "from attnloom.core.plan import Plan"),
        ("backends/vllm/a.py", "import vllm.config\nfrom attnloom.adapters import page_table"),
        ("backends/vllm/a.py", "import attnloom\nfrom attnloom import Attention, variants"),
    ],
)
def test_a_right_arrow_passes(path: str, text: str) -> None:
    assert broken(path, text) == []


def test_csrc_is_free_of_torch_and_python() -> None:
    sources = [path for ending in ("h", "hpp", "cpp", "jinja") for path in (ROOT / "csrc").rglob(f"*.{ending}")]
    assert sources
    includes = [
        (path.name, line.strip())
        for path in sources
        for line in path.read_text().splitlines()
        if line.lstrip().startswith("#include")
        and any(word in line for word in ("torch", "ATen", "c10", "Python.h", "pybind"))
    ]
    assert includes == []


def test_the_public_names_are_lazy() -> None:
    """Nothing of the package is imported when attnloom is, but for a type checker."""
    tree = ast.parse((ROOT / PUBLIC).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or ", ".join(alias.name for alias in node.names) for node in top]
    assert sorted(names) == ["__future__", "importlib", "typing"]

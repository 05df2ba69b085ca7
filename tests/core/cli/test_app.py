"""The program itself: help, errors, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import attnloom as package
from tests.core.cli.helpers import attnloom

ROOT = Path(__file__).parents[3]
COMMANDS = ("doctor", "plan", "build", "cache")


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_help_names_the_commands() -> None:
    ran = attnloom("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "cache list", "cache prune", "cache unpack"])
def test_every_command_has_help(command: str) -> None:
    ran = attnloom(*command.split(), "--help")
    assert ran.status == 0 and "Usage" in ran.out


def test_the_version() -> None:
    assert attnloom("--version").out.strip() == package.__version__


def test_no_arguments_show_help_and_a_mistyped_option_is_status_two() -> None:
    assert "Usage" in attnloom().out
    assert attnloom("plan", "--no-such-option").status == 2
    assert attnloom("no-such-command").status == 2


def test_what_a_user_can_mend_is_one_line(tmp_path: Path) -> None:
    ran = attnloom("cache", "unpack", tmp_path / "missing.tar.gz")
    assert ran.status == 1
    assert ran.err.startswith("attnloom: ") and ran.err.count("\n") == 1 and "missing.tar.gz" in ran.err


def test_a_file_that_ends_the_program_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    ran = attnloom("build", "--variant", f"{tmp_path / 'leaves.py'}:v", "--head-dim", 64)
    assert ran.status == 1
    assert ran.err.startswith("attnloom: variant ") and "SystemExit: 0" in ran.err and ran.err.count("\n") == 1


def test_importing_attnloom_imports_nothing_of_the_command_line() -> None:
    code = "import attnloom, sys; [getattr(attnloom, name) for name in attnloom.__all__]; print(*sys.modules)"
    # torch itself imports neither.
    assert not {"typer", "rich", "click", "attnloom.core.cli"} & set(python(code).split())


def test_help_imports_no_torch() -> None:
    code = """
import contextlib, io, sys
from attnloom.core.cli.app import main
sys.argv = ["attnloom", "plan", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*sys.modules)
"""
    assert not {"torch", "matplotlib", "jinja2", "ninja"} & set(python(code).split())


def test_more_rotated_dimensions_than_a_head_has_are_not_compiled() -> None:
    ran = attnloom("build", "--variant", "causal & rope(128)", "--head-dim", 64)
    assert ran.status == 1
    assert ran.err.startswith("attnloom: causal & rope(128), head_dim=64: params['rope_frequencies'].shape=(64,): ")

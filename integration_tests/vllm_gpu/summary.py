"""What is printed of a case when it has run."""

from __future__ import annotations

from typing import Any

from integration_tests.compare import agreement


def summary(result: dict[str, Any]) -> str:
    """A line for each backend of a case, against CUSTOM."""
    ours = result.get("CUSTOM", {})
    lines = []
    for backend, found in result.items():
        if backend == "name":
            continue
        if "error" in found:
            lines.append(f"{result['name']:16} {backend:12} FAILED: {found['error'].splitlines()[-1][:200]}")
            continue
        line = f"{result['name']:16} {backend:12} start {found['start_s']:.1f} s, {found['runner'].split('.')[-2]}"
        if backend == "CUSTOM":
            line += f", {found['impls']}, runs {found['runs_at_start']} -> {found['runs']} of {found['layers']} layers"
        elif "answers" in ours:
            line += f", {agreement(ours['answers'], found['answers'])}"
        lines.append(line)
    return "\n".join(lines)

"""Builds of variants: how long a new one takes, and whether hooks that change nothing leave the machine code alone."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import ROOT, Row, Target

from variant.process import in_child

COLD, WARM = Target("ours", 10_000, "ms"), Target("ours", 50, "ms")
NO_COST = Target("ours", 0, "that differ")

# Hooks that change nothing, in the words that attnloom knows them by.
IDENTITIES = {
    "all hooks, C++": """Variant("plain", right=0, logits_transform="return logits;", logits_mask="return true;",
        query_transform="return query[dim];", key_transform="return key[dim];", value_transform="return value[dim];",
        output_transform="return output[dim];")""",
    "all hooks, Python": """Variant("plain", right=0, logits_transform=lambda logits: logits,
        logits_mask=lambda b, h, q, k: True, query_transform=lambda query, dim: query[dim],
        key_transform=lambda key, dim: key[dim], value_transform=lambda value, dim: value[dim],
        output_transform=lambda output, dim: output[dim])""",
    "score_mod": "score_mod(lambda score, b, h, q, k: score) & Causal()",
    "composed": 'Variant("plain", logits_transform="return logits;") & Causal()',
}
# In other words: nothing promises that the compiler sees through them.
DISGUISED = {
    "logits": 'Variant("plain", right=0, logits_transform="const float same = logits; return same;")',
    "query": 'Variant("plain", right=0, query_transform="const float same = query[dim]; return same;")',
}


def builds(wanted: re.Pattern[str], options: argparse.Namespace) -> Iterator[Row]:
    """A new score_mod, from the Python function to an engine: on an empty cache, and in the processes after."""
    names = [f"new score_mod, {what}" for what in ("trace and compile", "second process")]
    if not any(wanted.search(name) for name in names):
        return
    cpus = sorted(os.sched_getaffinity(0))[-2:]
    first, later = [], []
    with tempfile.TemporaryDirectory() as folder:
        # Python keeps byte code as where a package is installed, whatever this machine says.
        common = {"ATTNLOOM_JIT": "on", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(folder) / "pyc")}
        for repeat in range(1 if options.quick else 3):
            environ = {**common, "ATTNLOOM_CACHE_DIR": str(Path(folder) / f"cache{repeat}")}
            first.append(in_child("build", cpus, options, environ))
            later += [in_child("build", cpus, options, environ) for _ in range(5)]
    for name, samples, target in zip(names, (first, later), (COLD, WARM), strict=True):
        parts = {part: round(statistics.median(sample[part] for sample in samples), 2) for part in samples[0]}
        span = {"min_ms": min(s["ms"] for s in samples), "max_ms": max(s["ms"] for s in samples)}
        yield Row(name, parts.pop("ms"), "ms", target=target, detail={"samples": len(samples), **span, **parts})


def traced_build() -> dict[str, float]:
    """In a child: ms until there is an engine, in all and in parts; attnloom's imports are counted apart."""
    import torch

    import attnloom

    num_qo_heads = 8
    table = torch.randn(num_qo_heads, 64)

    def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).clamp(0, 63)
        return torch.tanh(score / 20.0) * 20.0 + torch.where(distance < 40, table[h, distance], -0.5)

    clocks = [(time.perf_counter(), time.process_time())]
    engine, causal, from_mod = attnloom.Attention, attnloom.variants.Causal(), attnloom.score_mod  # found on first use
    clocks.append((time.perf_counter(), time.process_time()))
    variant = from_mod(bias) & causal
    clocks.append((time.perf_counter(), time.process_time()))
    engine(num_qo_heads, 2, 128, dtype=torch.bfloat16, variant=variant)
    clocks.append((time.perf_counter(), time.process_time()))
    spans = {}
    for name, begin, end in (("", 1, 3), ("trace_", 1, 2), ("kernel_", 2, 3), ("imports_", 0, 1)):
        # CPU time is this process's: a compiler's is not in it.
        for clock, what in enumerate(("ms", "cpu_ms")):
            spans[name + what] = round((clocks[end][clock] - clocks[begin][clock]) * 1e3, 2)
    return spans


def identities(wanted: re.Pattern[str]) -> Iterator[Row]:
    """The machine code of kernels with identity hooks, each built in a cache of its own, against that without."""
    cases = {f"identity hooks, {case}": (text, NO_COST) for case, text in IDENTITIES.items()}
    cases |= {f"identity in other words, {case}": (text, None) for case, text in DISGUISED.items()}
    cases = {name: case for name, case in cases.items() if wanted.search(name)}
    if not cases:
        return
    plain, plain_source = machine_code("Causal()")
    for name, (text, target) in cases.items():
        code, source = machine_code(text)
        same = code == plain
        hashes = [hashlib.sha256(part).hexdigest()[:16] for part in (code, plain)]
        sizes = [len(code), len(plain)]
        detail = {"same_code": same, "same_source": source == plain_source, "bytes": sizes, "sha256": hashes}
        yield Row(name, 0 if same else 1, "modules", target=target, detail=detail)


def machine_code(variant: str) -> tuple[bytes, str]:
    """(.text of a kernel built from nothing, its rendered source)."""
    program = (
        "import sys, torch\n"
        "from attnloom import Variant, score_mod\n"
        "from attnloom.core.variants import Causal\n"
        "from attnloom.core.kernels import attention_spec\n"
        "from attnloom.core.jit.module import build\n"
        f"spec = attention_spec('cpu', torch.float32, 64, 64, {variant})\n"
        "print(build([spec])[0]); print(spec.sources[0].text)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "ATTNLOOM_CACHE_DIR": str(Path(folder) / "cache"), "ATTNLOOM_JIT": "on"}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True
        )
        path, source = done.stdout.split("\n", 1)
        module = Path(path) / "module.so" if Path(path).is_dir() else Path(path)
        text = Path(folder) / "text"
        subprocess.run(["objcopy", "-O", "binary", "--only-section=.text", module, text], check=True)
        return text.read_bytes(), source

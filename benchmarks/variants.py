"""Variants: against torch's flex_attention on a CPU, by visible tiles, their build, and the lines that users write.

    python benchmarks/variants.py [--rows REGEX] [--threads 1 2] [--quick] [--json FILE]

flex_attention is compiled for CPU (inference, GQA by enable_gqa, a BlockMask wherever there is a mask). Outputs are
compared with each other and with float64 before anything is timed; then both take turns. Each number of threads is a
process of its own, one CPU a thread. On one thread the ratio is of CPU time, which others on the machine hardly move;
on two it is of wall time.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import ROOT, Row, Target, arguments, machine, publish

if TYPE_CHECKING:
    from torch import Tensor
    from variant_cases import Problem, Spelled

AGAINST_FLEX, BY_TILES = Target("ratio", 1.25), Target("ratio", 1.15)
COLD, WARM = Target("ours", 10_000, "ms"), Target("ours", 50, "ms")
NO_COST, TEN_LINES = Target("ours", 0, "that differ"), Target("ours", 10, "lines")
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}  # of the largest output
LONG = 4096

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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it finds, e.g. 'ALiBi.*bf16'")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="5 pairs a row instead of at least 11")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, re.compile(options.rows), 5 if options.quick else 11)
        return
    cpus = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    processes = []
    wanted = re.compile(options.rows)
    for threads in options.threads:
        if threads > len(cpus):
            print(f"{threads} threads: skipped, this process may use {len(cpus)} CPUs")
            continue
        done = in_child(f"times {threads}", cpus[-threads:], options)
        processes.append(done["process"])
        rows += [Row(**{**row, "target": Target(**row["target"])}) for row in done["rows"]]
    rows += [row for row in (*builds(wanted, options), *identities(wanted), *example_lines(wanted))]
    publish("variants", rows, options.json, peers=["triton"], more={"processes": processes})


def in_child(
    work: str, cpus: list[int], options: argparse.Namespace, environ: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a process of its own found; it may use ``cpus``, each by one thread of OpenMP."""
    threads = {"OMP_NUM_THREADS": str(len(cpus)), "GOMP_CPU_AFFINITY": ",".join(map(str, cpus))}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        subprocess.run(
            [sys.executable, __file__, "--child", work, "--rows", options.rows, *["--quick"] * options.quick],
            env={**os.environ, **threads, **(environ or {}), "ATTNLOOM_BENCHMARK_FILE": file.name},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            check=True,
        )
        result: dict[str, Any] = json.load(file)
        return result


def child(work: str, wanted: re.Pattern[str], pairs: int) -> None:
    """In a child: do ``work`` and write what it found."""
    if work.startswith("times"):
        found = machine()  # before OpenMP binds this thread to its own CPU
        import torch

        threads = torch.get_num_threads()
        print(f"threads {threads}, affinity {found['affinity']}, {found['omp_env']}", flush=True)
        rows = [asdict(row) for row in (*flex_rows(threads, wanted, pairs), *tile_rows(threads, wanted, pairs))]
        result: dict[str, Any] = {"process": {"threads": threads, **found}, "rows": rows}
    else:
        result = traced_build()
    Path(os.environ["ATTNLOOM_BENCHMARK_FILE"]).write_text(json.dumps(result))


# ---------------------------------------------------------------------------------------------------------- times


def flex_rows(threads: int, wanted: re.Pattern[str], pairs: int) -> Iterator[Row]:
    """The catalogue against flex_attention."""
    from variant_cases import CASES, DECODES, PREFILLS, Problem, Shape

    for phase, requests, qo_len, kv_len in (("prefill", 2, 1024, 1024), ("decode", 8, 1, 2048)):
        for dtype in ("fp32", "bf16"):
            for head_dim in (64, 128):
                shape = Shape(phase, requests, qo_len, kv_len, head_dim, dtype)
                cases = PREFILLS if phase == "prefill" else DECODES
                names = {case: f"{case}: {shape} {plural(threads)}" for case in cases}
                problem = None
                for case, name in names.items():
                    if wanted.search(name):
                        problem = problem or Problem(shape)
                        yield shown(flex_row(name, problem, CASES[case](shape), threads, pairs))


def flex_row(name: str, problem: Problem, spelled: Spelled, threads: int, pairs: int) -> Row:
    """Check both, then time them in turns."""
    ours, plan = problem.step(spelled)
    theirs = flex_step(problem, spelled)
    shape = problem.shape
    outs = {
        "ours": ours().unflatten(0, (shape.requests, -1)).transpose(1, 2).double(),
        "flex_attention": theirs().double(),
    }
    expected = problem.expected(spelled)
    size = expected.abs().max()
    errors = {side: float((out - expected).abs().max() / size) for side, out in outs.items()}
    errors["between them"] = float((outs["ours"] - outs["flex_attention"]).abs().max() / size)
    # NaN compares false.
    if any(not error <= TOLERANCE[shape.dtype] for error in errors.values()):
        raise SystemExit(f"{name}: outputs differ: {errors}")
    wall, cpu = in_turns({"ours": ours, "flex_attention": theirs}, pairs)
    detail = {"error": {side: float(f"{error:.1e}") for side, error in errors.items()}}
    return timed_row(name, wall, cpu, threads, AGAINST_FLEX, {**detail, "tiles": int(plan().worker_tiles().sum())})


def flex_step(problem: Problem, spelled: Spelled) -> Callable[[], Tensor]:
    """flex_attention compiled for the shape; its BlockMask is made once."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A case compiles once; the guards of the one before would count as recompilations of it.
    torch._dynamo.reset()
    shape = problem.shape
    q, k, v = problem.dense()
    first, rotate = shape.first, spelled.rotate
    scores, mask = spelled.score_mod, spelled.mask_mod
    if first and scores is not None:

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return scores(score, b, h, q + first, k)
    else:
        score_mod = scores
    if first and mask is not None:

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            return mask(b, h, q + first, k)
    else:
        mask_mod = mask
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, shape.requests, None, shape.qo_len, shape.kv_len, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotate is not None:
            q, k = rotate(q, first), rotate(k, 0)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)  # type: ignore

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def step() -> Tensor:
        with torch.no_grad():
            return compiled(q, k, v)

    return step


def tile_rows(threads: int, wanted: re.Pattern[str], pairs: int) -> Iterator[Row]:
    """Sliding windows and document masks of 4096 tokens: time against causal, over tiles against causal."""
    from variant_cases import Problem, Shape, Spelled, document_masks

    from attnloom import mask_mod
    from attnloom.core.variants import Causal, SlidingWindow

    for dtype in ("fp32", "bf16"):
        shape = Shape("prefill", 1, LONG, LONG, 128, dtype)
        window = mask_mod(lambda b, h, q, k: q - k < 512, "window")
        lengths = [768, 1024, 512, 1792]
        cases = {
            "sliding window 512, band": Spelled(SlidingWindow(512)),
            "sliding window 2048, band": Spelled(SlidingWindow(2048)),
            "sliding window 512, block mask": Spelled(window & Causal(), block_mask=True),
            "documents, block mask": document_masks(shape, lengths, declared=False),
            "documents, declared range": document_masks(shape, lengths),
        }
        problem = None
        for case, spelled in cases.items():
            name = f"{case}: {shape} {plural(threads)}"
            if wanted.search(name):
                problem = problem or Problem(shape)
                yield shown(tile_row(name, problem, spelled, threads, pairs))


def tile_row(name: str, problem: Problem, spelled: Spelled, threads: int, pairs: int) -> Row:
    """Time in turns with causal; the ratio is that of times over that of executed KV tiles."""
    from variant_cases import Spelled

    from attnloom.core.variants import Causal

    ours, plan = problem.step(spelled)
    causal, causal_plan = problem.step(Spelled(Causal()))
    ours(), causal()
    tiles = {side: int(made().worker_tiles().sum()) for side, made in (("ours", plan), ("causal", causal_plan))}
    wall, cpu = in_turns({"ours": ours, "causal": causal}, pairs)
    row = timed_row(name, wall, cpu, threads, BY_TILES, {"tiles": tiles})
    assert row.ratio is not None
    share = tiles["ours"] / tiles["causal"]
    times = {"ratio_of_times": row.ratio, "ratio_of_tiles": round(share, 4)}
    return Row(**{**vars(row), "ratio": round(row.ratio / share, 4), "detail": {**row.detail, **times}})


def in_turns(
    sides: dict[str, Callable[[], Any]], pairs: int, seconds: float = 2.0
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(wall, CPU) us of each side's calls, taken A B A B: ``pairs`` of them, and more while they take no time."""
    wall: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    stop = time.perf_counter() + seconds
    while len(wall["ours"]) < pairs or (time.perf_counter() < stop and len(wall["ours"]) < 20 * pairs):
        for side, step in sides.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            step()
            wall[side].append((time.perf_counter() - begin) * 1e6)
            cpu[side].append((time.process_time() - cpu_begin) * 1e6)
    return wall, cpu


def timed_row(
    name: str,
    wall: dict[str, list[float]],
    cpu: dict[str, list[float]],
    threads: int,
    target: Target,
    detail: dict[str, Any],
) -> Row:
    """A row of medians: of CPU time on one thread, of wall time on more."""
    peer = next(side for side in wall if side != "ours")
    quoted = cpu if threads == 1 else wall
    medians = {side: statistics.median(quoted[side]) for side in quoted}
    clocks = {
        clock: {side: round(statistics.median(samples), 1) for side, samples in times.items()}
        for clock, times in (("wall_us", wall), ("cpu_us", cpu))
    }
    return Row(
        name,
        round(medians["ours"], 1),
        peers={peer: round(medians[peer], 1)},
        ratio=round(medians["ours"] / medians[peer], 4),
        target=target,
        detail={
            "threads": threads,
            "clock": "cpu" if threads == 1 else "wall",
            "pairs": len(wall["ours"]),
            **clocks,
            "min_wall_us": {side: round(min(samples), 1) for side, samples in wall.items()},
            **detail,
        },
    )


def shown(row: Row) -> Row:
    peer, theirs = next(iter(row.peers.items()))
    met = "" if row.met else "  MISSED"
    print(f"  {row.row}: {row.ours:,.0f} us, {peer} {theirs:,.0f} us, ratio {row.ratio:.3f}{met}", flush=True)
    return row


def plural(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


# --------------------------------------------------------------------------------------------------------- builds


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


# ----------------------------------------------------------------------------------------------------- identities


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


# ------------------------------------------------------------------------------------------------------- examples


BEGIN, END = "# The variant.", "# Its end."


def example_lines(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Lines of code that define the variant of each example: in Python between two comments, or a TOML file."""
    for file in sorted((ROOT / "examples").glob("*.*")):
        name = f"lines of the variant, {file.name}"
        text = file.read_text()
        if not wanted.search(name):
            continue
        if file.suffix == ".toml":
            count = sum(bool(line.partition("#")[0].strip()) for line in text.splitlines())
            yield Row(name, count, "lines", target=TEN_LINES)
        elif BEGIN in text:
            lines = text.splitlines()
            begin, end = lines.index(BEGIN) + 1, lines.index(END) + 1
            module = ast.parse(text)
            inside = {name: statement for name, statement in named(module).items() if begin < statement.lineno < end}
            makers = [statement for statement in inside.values() if makes_variant(statement)]
            if not makers:
                raise SystemExit(f"{file.name}: expected a variant between {BEGIN!r} and {END!r}")
            yield Row(name, lines_of(inside), "lines", target=TEN_LINES, detail={"defines": list(inside)})


def named(module: ast.Module) -> dict[str, ast.stmt]:
    """The top-level statements but imports, by what they are called."""
    found: dict[str, ast.stmt] = {}
    for statement in module.body:
        name = getattr(statement, "name", None) or ast.unparse(statement).partition(" = ")[0]
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            found[name] = statement
    return found


def makes_variant(statement: ast.stmt) -> bool:
    """Whether it calls Variant, score_mod, mask_mod, or an entry of the catalogue."""
    return any(
        re.fullmatch(r"(\w+\.)*(Variant|score_mod|mask_mod)|(\w+\.)*variants\.\w+", ast.unparse(node.func))
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    )


def lines_of(statements: dict[str, ast.stmt]) -> int:
    """Lines that hold code: docstrings, comments and empty lines do not count."""
    lines: set[int] = set()
    for statement in statements.values():
        documentation: set[int] = set()
        for node in ast.walk(statement):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and _is_text(body[0].value):
                documentation |= set(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt | ast.expr):
                lines |= {node.lineno, node.end_lineno or node.lineno} - documentation
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - documentation
    return len(lines)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


if __name__ == "__main__":
    main()

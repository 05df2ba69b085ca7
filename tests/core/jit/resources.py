"""What CUDA kernels take of a multiprocessor: compiled for an architecture, read from what ptxas says. No GPU needed.

``python -m tests.core.jit.resources`` prints the table; with ``--write`` it renews resources.json, which the tests
compare with.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnloom import Variant, variants
from attnloom.core.device_module import device_spec
from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.jit.template import CSRC
from attnloom.core.jit.toolchain import toolchain
from attnloom.core.kernels import attention_spec

TABLE = Path(__file__).with_name("resources.json")
TARGETS = ("80", "90a", "100", "120")

_HOOKED = variants.SoftCap() & variants.Sinks() & variants.PackedMask()
_ALL = _HOOKED & Variant(
    "vectors",
    query_transform="return query[dim] * 2.0f;",
    key_transform="return key[dim] + 0.5f * key[dim ^ 1];",
    value_transform="return value[dim] + 0.5f * value[dim ^ 1];",
    output_transform="return output[dim] + 0.5f * output[dim ^ 1];",
)
# (q dtype, cache dtype, head_dim, variant). Targets other than Hopper compile the first few only: they differ from it
# in what ptxas does, not in what it is given.
_KERNELS: dict[str, tuple[torch.dtype, torch.dtype, int, Variant]] = {
    "bf16, 128, causal": (torch.bfloat16, torch.bfloat16, 128, variants.Causal()),
    "bf16, 128, hooks": (torch.bfloat16, torch.bfloat16, 128, _HOOKED),
    "f16, 64, causal": (torch.float16, torch.float16, 64, variants.Causal()),
    "bf16, e4m3, 128, causal": (torch.bfloat16, torch.float8_e4m3fn, 128, variants.Causal()),
    "bf16, e5m2, 128, causal": (torch.bfloat16, torch.float8_e5m2, 128, variants.Causal()),
    "bf16, 80, causal": (torch.bfloat16, torch.bfloat16, 80, variants.Causal()),
    "bf16, 256, causal": (torch.bfloat16, torch.bfloat16, 256, variants.Causal()),
    "bf16, 128, prefix": (torch.bfloat16, torch.bfloat16, 128, variants.PrefixLM()),
    "bf16, 128, sigmoid": (torch.bfloat16, torch.bfloat16, 128, variants.Sigmoid(0.5) & variants.Causal()),
    "bf16, 128, rope": (torch.bfloat16, torch.bfloat16, 128, variants.RoPE(128) & variants.Causal()),
    "bf16, e4m3, 128, rope": (torch.bfloat16, torch.float8_e4m3fn, 128, variants.RoPE(128) & variants.Causal()),
    "bf16, 128, all hooks": (torch.bfloat16, torch.bfloat16, 128, _ALL),
    "f16, e5m2, 192, causal": (torch.float16, torch.float8_e5m2, 192, variants.Causal()),
}
_EVERYWHERE = ("bf16, 128, causal", "bf16, 128, hooks", "f16, 64, causal")
_INVARIANT = (
    *_EVERYWHERE,
    "bf16, e4m3, 128, causal",
    "bf16, 256, causal",
    "bf16, 128, sigmoid",
    "bf16, 128, all hooks",
    "f16, e5m2, 192, causal",
)  # those that are compiled for the batch_invariant mode too


@dataclass(frozen=True)
class Resources:
    """Of one kernel.

    Attributes:
        kernel: its name.
        registers: of a thread.
        spills: bytes stored and loaded because registers ran out.
        stack: bytes of a thread's stack frame.
        shared: bytes of shared memory of a CTA, static and dynamic.
        threads: of a CTA, at most.
        ctas_per_sm: how many share a multiprocessor.
    """

    kernel: str
    registers: int
    spills: int
    stack: int
    shared: int
    threads: int
    ctas_per_sm: int


@dataclass(frozen=True)
class Multiprocessor:
    """Limits that CTAs share (CUDA C++ Programming Guide, compute capabilities)."""

    threads: int
    ctas: int
    shared: int
    registers: int = 65536


MULTIPROCESSORS = {
    "80": Multiprocessor(2048, 32, 164 << 10),
    "90a": Multiprocessor(2048, 32, 228 << 10),
    "100": Multiprocessor(2048, 32, 228 << 10),
    "120": Multiprocessor(1536, 24, 100 << 10),
}
_RESERVED_SHARED = 1 << 10  # of each CTA, for the system


def ctas_per_sm(sm: Multiprocessor, registers: int, shared: int, threads: int) -> int:
    """CTAs that fit: registers are given to warps in units of 256, shared memory in units of 128 bytes."""
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // 256) * 256
    of_cta = -(-(shared + _RESERVED_SHARED) // 128) * 128
    return min(sm.ctas, sm.threads // (warps * 32), sm.registers // (of_warp * warps), sm.shared // of_cta)


def instantiations() -> Iterator[tuple[str, str, ModuleSpec]]:
    """(target, name, what is compiled)."""
    for target in TARGETS:
        yield target, "device", device_spec(target)
        for name, (dtype, kv_dtype, head_dim, variant) in _KERNELS.items():
            if target != "90a" and name not in _EVERYWHERE:
                continue
            for invariant in (False, True) if name in _INVARIANT else (False,):
                spec = attention_spec("sm80", dtype, head_dim, head_dim, variant, target, kv_dtype, invariant)
                yield target, f"{name}, batch invariant" if invariant else name, spec


def compiled(spec: ModuleSpec) -> list[Resources]:
    """Compile a module and read what its kernels take.

    Raises:
        CompilerNotFound: there is no nvcc.
        RuntimeError: it refused the source; the message is what it printed.
    """
    tools = toolchain(spec.family, spec.target)
    found = []
    for source in spec.sources:
        text = source.text if isinstance(source.text, str) else source.text.text()
        attention = source.name == "attention.cu"
        if attention:
            # The dynamic shared memory is the launch's to say; the rendered source knows it as a constant.
            text += (
                "\nATTNLOOM_EXPORT const int32_t attnloom_shared_bytes[2] = "
                "{Shape<false>::kSharedBytes, Shape<true>::kSharedBytes};\n"
            )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / source.name).write_text(text)
            # The files of the device module call each other: names stay open, as nothing here is run.
            command = [*tools.command, *tools.recipe.compile_flags, "-Xptxas", "-v", "-I", str(CSRC), "--keep"]
            done = subprocess.run(
                [*command, "-shared", "-o", "module.so", source.name],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            dynamic = (0, 0)
            if attention:
                library = ctypes.CDLL(str(Path(folder) / "module.so"))
                dynamic = tuple((ctypes.c_int32 * 2).in_dll(library, "attnloom_shared_bytes"))
            ptx = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
            found += _parsed(done.stderr, ptx, spec.target, dynamic)
    return sorted(found, key=lambda each: each.kernel)


_INFO = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def _parsed(log: str, ptx: str, target: str, dynamic: tuple[int, ...]) -> list[Resources]:
    # dynamic: shared memory of the attention kernels without and with tall query tiles.
    # Functions that were not inlined have a frame and spills of their own, reported like a kernel's but without a
    # "Used" line: they are counted with the kernels of their file.
    elsewhere = sum(
        int(stores) + int(loads)
        for stores, loads in re.findall(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    )
    found = []
    for match in _INFO.finditer(log):
        own = int(match["stores"]) + int(match["loads"])
        static = re.search(r"(\d+) bytes smem", match["rest"])
        name = kernel_name(match["name"])
        is_attention = name.startswith("attention_kernel")
        shared = int(static[1]) if static else 0
        if is_attention:
            # The last three arguments of Shape: tall tiles, little shared memory, the batch_invariant mode.
            tall = re.search(r"Lb([01])ELb[01]ELb[01]E", match["name"]).group(1) == "1"  # type: ignore[union-attr]
            name += "" if tall else ", short tiles"
            shared += dynamic[tall]
        bound = re.search(rf"\.entry {match['name']}\(.*?\)\s*\.maxntid (\d+)", ptx, re.DOTALL)
        threads = int(bound[1]) if bound else 1024
        registers = int(match["registers"])
        sm = MULTIPROCESSORS[target]
        found.append(
            Resources(
                name,
                registers,
                elsewhere if is_attention else own,
                int(match["stack"]),
                shared,
                threads,
                ctas_per_sm(sm, registers, shared, threads),
            )
        )
    return found


def kernel_name(mangled: str) -> str:
    """The last plain name of a mangled one, with its template arguments where they are plain names and numbers."""
    at, name = mangled.find("_ZN") + 3 if "_ZN" in mangled else 2, mangled
    while (match := re.compile(r"\d+").match(mangled, at)) is not None:
        end = match.end() + int(match[0])
        name, at = mangled[match.end() : end], end
    arguments: list[str] = []
    if mangled[at : at + 1] == "I":
        at += 1
        while at < len(mangled) and mangled[at] != "E":
            if (match := re.compile(r"L(?:\d+\w*?[a-z_]|[a-z])(\d+)E").match(mangled, at)) is not None:
                arguments.append(match[1])
                at = match.end()
            elif (match := re.compile(r"\d+").match(mangled, at)) is not None:
                at = match.end() + int(match[0])
                arguments.append(mangled[match.end() : at])
            elif mangled[at] in _BUILTIN:
                arguments.append(_BUILTIN[mangled[at]])
                at += 1
            else:
                return name  # a name of several parts: a variant's, a shape's
    return f"{name}<{', '.join(arguments)}>" if arguments else name


_BUILTIN = {"h": "uint8", "t": "uint16", "j": "uint32"}


def compiler() -> str:
    """nvcc's version: another one may give other numbers."""
    return toolchain("sm80", "90a").identity


def table() -> dict[str, Any]:
    """Everything, as resources.json holds it."""
    targets: dict[str, dict[str, list[dict[str, object]]]] = {}
    for target, name, spec in instantiations():
        rows = [asdict(each) for each in compiled(spec)]
        targets.setdefault(target, {})[name] = rows
        for row in rows:
            print(target, name, row, flush=True)
    return {"compiler": compiler(), "targets": targets}


def text(made: dict[str, Any]) -> str:
    """A table as JSON, a kernel a line."""
    lines = ["{", f' "compiler": {json.dumps(made["compiler"])},', ' "targets": {']
    for target, names in made["targets"].items():
        lines.append(f"  {json.dumps(target)}: {{")
        for name, kernels in names.items():
            lines.append(f"   {json.dumps(name)}: [")
            lines += [f"    {json.dumps(kernel)}," for kernel in kernels]
            lines[-1] = lines[-1][:-1]
            lines.append("   ],")
        lines[-1] = "   ]"
        lines.append("  },")
    lines[-1] = "  }"
    return "\n".join([*lines, " }", "}", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew resources.json")
    made = table()
    if parser.parse_args().write:
        TABLE.write_text(text(made))

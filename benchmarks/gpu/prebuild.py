"""Compile the FlashInfer kernels of the rows ahead, where there is nvcc and no GPU is needed.

    FLASHINFER_CUDA_ARCH_LIST=9.0a python benchmarks/gpu/prebuild.py [FOLDER]

They go to FOLDER/NAME/NAME.so, by default where the installed FlashInfer looks for kernels built ahead. kernels.py runs
it without its JIT, so that none is compiled in the middle of a run. 55 translation units: half an hour on two cores.
fa3 needs cuRAND's headers (CPATH); all link against libcuda: without a driver, an empty one on LIBRARY_PATH will do.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch


def kernels(rows: dict[str, Any]) -> list[Any]:
    """What each peer's wrapper asks for at its plan, each once (flashinfer-python 0.7.4)."""
    from flashinfer.jit.attention import modules as make

    q, index = torch.bfloat16, torch.int32
    found: dict[str, Any] = {}
    for shape in rows.values():
        kv = torch.float8_e4m3fn if shape.fp8_kv else q
        window = shape.window is not None
        common = (q, kv, q, index, shape.head_dim, shape.head_dim, 0)  # 0: positions are not encoded
        makers: dict[str, Callable[[], Any]] = {
            "FI fa2": partial(make._gen_batch_prefill_primary_module, "fa2", *common, window, False, False),
            "FI fa3": partial(make.gen_batch_prefill_module, "fa3", *common, window, False, False),
            "FI persistent": partial(make._gen_batch_attention_primary_module, *common, False, False),
            "FI decode": partial(make.gen_batch_decode_module, *common, window, False),
        }
        for made in [maker() for peer, maker in makers.items() if peer in shape.peers]:
            found[made.name] = made
    return list(found.values())


def main() -> None:
    from flashinfer.jit import env
    from flashinfer.jit.core import build_jit_specs

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from gpu.rows import ROWS

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(env.FLASHINFER_AOT_DIR)
    missing = [spec for spec in kernels(ROWS) if not (folder / spec.name / f"{spec.name}.so").exists()]
    print(f"{len(missing)} to build", flush=True)
    build_jit_specs(missing, verbose=False)
    for spec in missing:
        target = folder / spec.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, target)
        print(target / f"{spec.name}.so")


if __name__ == "__main__":
    main()

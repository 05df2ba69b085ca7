"""What SGLang's GPU build needs to be imported on a machine without a GPU; Python runs this first in every process.

Two of three workarounds, SGLang itself unedited: torchvision's operators are declared before torchvision is imported,
and the package `sgl_kernel` beside this file stands in for SGLang's compiled kernels. The third is the environment
variable `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# A library that is collected takes its operators along.
libraries: list[Any] = []


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the operators that torchvision registers shape functions for.

    They live in torchvision's compiled library, which does not load beside a CPU build of torch. SGLang always imports
    torchvision, and text models never call the operators.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds nothing; what is looked for is the moment."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            libraries.append(library)
        return None


sys.meta_path.insert(0, DeclareOperators())

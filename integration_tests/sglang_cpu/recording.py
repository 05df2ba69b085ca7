"""A CUDA graph's stand-in on a CPU: what a step did is recorded once and done again, on the same memory.

As in a graph, operations, shapes and addresses are those of the capture, Python does not run again, and a plan is made
anew into the captured one. What a replay computes is what a GPU would.

As a graph, a recording keeps what was allocated inside, but not what torch's operations find outside. A replay after
that was freed fails, where a GPU would compute with whatever lies there by then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attnloom import Attention


class Outside:
    """A tensor in memory that somebody else keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor, if its memory is still there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, f"a graph reads a {self._dtype} tensor of {self._place[1]} that was freed since"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class Recording(TorchDispatchMode):
    """Records what happens inside a `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = 0
        self._own: dict[int, torch.UntypedStorage] = {}
        self._again: list[Callable[[], None]] = []
        self._inside = False
        self._patches = [patch.object(Attention, name, self._recorded(name)) for name in ("plan", "run")]

    def __enter__(self) -> Recording:
        for each in self._patches:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in self._patches:
            each.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of torch."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self._inside:
            given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            for each in tree_leaves(found):
                if isinstance(each, Tensor) and _memory(each) not in given:
                    self._own[_memory(each)] = each.untyped_storage()
            kept = tree_map_only(Tensor, self._kept, (args, kwargs, found))
            self._again.append(lambda: _repeat(func, *tree_map_only(Outside, Outside.tensor, kept)))
        return found

    def _kept(self, tensor: Tensor) -> Tensor | Outside:
        return tensor if _memory(tensor) in self._own else Outside(tensor)

    def _recorded(self, name: str) -> Callable[..., Any]:
        """A method of the engine, which on a GPU is a launch."""
        original = getattr(Attention, name)

        def call(engine: Attention, *args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                found = original(engine, *args, **kwargs)
            finally:
                self._inside = False
            if name == "plan":
                self.plans += 1
                kwargs["into"] = found
            self._again.append(lambda: original(engine, *args, **kwargs))
            return found

        return call

    def replay(self) -> None:
        """Do it all again."""
        for again in self._again:
            again()


def _memory(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _repeat(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    fresh = func(*args, **kwargs)
    for new, old in zip(tree_leaves(fresh), tree_leaves(found), strict=True):
        if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)


class Graph:
    """A real CUDA graph, with the same methods."""

    def __init__(self) -> None:
        self.plans = 0
        self._graph = torch.cuda.CUDAGraph()
        self._inside = ExitStack()

    def __enter__(self) -> Graph:
        original = Attention.plan

        def counted(engine: Attention, *args: Any, **kwargs: Any) -> Any:
            self.plans += 1
            return original(engine, *args, **kwargs)

        self._inside.enter_context(patch.object(Attention, "plan", counted))
        self._inside.enter_context(torch.cuda.graph(self._graph))
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)

    def replay(self) -> None:
        """Do it all again."""
        self._graph.replay()

"""The JIT: a template is rendered, ninja builds it, ctypes loads it; a cache on disk keeps it.

``render`` gives a source text, ``ModuleSpec`` says what to build from such texts, ``load`` gives the library,
``build`` prepares many at once.
"""

from attnloom.core.jit.build import Progress, build
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC, render

__all__ = ["CSRC", "ModuleSpec", "Progress", "Source", "build", "load", "render"]

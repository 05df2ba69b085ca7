"""The JIT: a template is rendered, ninja builds it, ctypes loads it; a cache on disk keeps it.

``Rendering`` is a source text to be rendered, ``ModuleSpec`` says what to build from such texts, ``load`` gives the
library, ``build`` prepares many at once.
"""

from attnloom.core.jit.build import Progress, build
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC, Rendering, render

__all__ = ["CSRC", "ModuleSpec", "Progress", "Rendering", "Source", "build", "load", "render"]

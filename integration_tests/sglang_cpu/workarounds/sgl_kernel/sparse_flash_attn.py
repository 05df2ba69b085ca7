"""As the package: names that exist, and raise when they are called."""

from sgl_kernel import __getattr__ as __getattr__

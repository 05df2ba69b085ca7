"""Hooks written as Python functions, translated to the C++ dialect."""

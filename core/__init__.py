"""The engine: layouts, plans, variants, kernels and the JIT that builds them. Knows torch, knows no framework."""

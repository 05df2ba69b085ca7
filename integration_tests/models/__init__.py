"""Models for the demo and the tests: one real, the others tiny and random."""

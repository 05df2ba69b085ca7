"""The real frameworks, end to end."""

"""vLLM on a CPU with attnloom as its attention backend."""

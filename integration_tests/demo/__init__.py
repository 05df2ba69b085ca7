"""`make demo`: vLLM answers a question with attnloom as its attention backend, beside its own CPU backend."""

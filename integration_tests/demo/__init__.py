"""A server answers a question with attnloom as its attention backend, beside the same server with its own."""

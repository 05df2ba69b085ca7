"""attnloom as vLLM's attention backend `CUSTOM`, for vLLM 0.26 to 0.32. vLLM enters through plugin.py."""

"""attnloom as SGLang's attention backend `attnloom`, for SGLang 0.5.17 and 0.5.18. SGLang enters through plugin.py."""

"""attnloom as SGLang's attention backend `attnloom`, for SGLang 0.5.17 to 0.5.23. SGLang enters through plugin.py."""

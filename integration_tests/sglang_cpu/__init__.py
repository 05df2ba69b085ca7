"""The real SGLang 0.5.17, unedited, on a CPU with attnloom."""

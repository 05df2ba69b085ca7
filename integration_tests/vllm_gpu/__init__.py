"""vLLM on a GPU: attnloom beside vLLM's own backends. Nothing here runs without CUDA and vLLM's GPU build."""

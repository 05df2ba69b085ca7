"""SGLang on a GPU: attnloom beside SGLang's own triton backend. Nothing here runs without CUDA and SGLang."""

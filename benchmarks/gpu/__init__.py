"""What kernels.py is made of: rows, their tensors, ours, the peers, timing, ceilings, the result file, the picture."""

"""Checks and times the CUDA backend on a machine with a GPU: `python -m tools.gpu_check`."""

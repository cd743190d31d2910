"""CUDA graphs for PyTorch that just work."""

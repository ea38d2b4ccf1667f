"""Attention (3.1 to 3.12) in NumPy, JAX/Flax and PyTorch: three implementations that share nothing but `spec`."""

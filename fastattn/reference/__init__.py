"""Every operator in plain PyTorch: the specification of what the kernels compute, and their oracle."""

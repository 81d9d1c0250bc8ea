"""Triton kernels, one file per operator (installed as `fastattn.kernels`)."""

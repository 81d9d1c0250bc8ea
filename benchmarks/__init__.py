"""Benchmarks of fastattn: cases declared as data, a paired runner, and a pytest-benchmark suite.

`python -m benchmarks attention` compares with PyTorch in alternating samples and prints ratios beside the
bars; `pytest benchmarks` times the same cases one by one. See README.md in this folder.
"""

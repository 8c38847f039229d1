"""Benchmarks: ``python -m benchmarks [name]``. Figures are ratios against a peer in the same run, medians of several."""

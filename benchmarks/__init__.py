"""Benchmarks: ``python -m benchmarks [name]``. Figures are ratios to a peer in the same run, medians of several."""

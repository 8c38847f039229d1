"""Simulated brokers: sans-I/O, deterministic, driven by the host that owns time and chance."""

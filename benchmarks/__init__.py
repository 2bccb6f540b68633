"""Benchmarks: every figure in the documentation comes from one of these."""

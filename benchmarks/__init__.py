"""Benchmarks: every figure in the documentation comes from one of these."""

import os

# Threads that spin while they wait for one another lose their core to other processes and hold all
# of them up: on a shared machine that measures the neighbours. It must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

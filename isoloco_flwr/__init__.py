"""Low-communication pre-training with model merging, for Flower.

`IsoLoCo(...)` stands in for Flower's `FedAvg(...)`; so do the other presets. The merges themselves
are in `isoloco_flwr.merging`.
"""

from isoloco_flwr.strategy import DiLoCo, IsoC, IsoLoCo, LocalSGD, MergeStrategy

__all__ = ["DiLoCo", "IsoC", "IsoLoCo", "LocalSGD", "MergeStrategy"]

__version__ = "0.1.0"

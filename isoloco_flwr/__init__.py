"""Low-communication pre-training with model merging, for Flower.

`IsoLoCo(...)` stands in for Flower's `FedAvg(...)`; so do the other presets. The merges themselves
are in `isoloco_flwr.merging`.
"""

from isoloco_flwr.strategy import (
    DARE,
    TIES,
    TSVM,
    DiLoCo,
    IsoC,
    IsoCTS,
    IsoLoCo,
    LocalSGD,
    MergeStrategy,
)

__all__ = [
    "DARE",
    "TIES",
    "TSVM",
    "DiLoCo",
    "IsoC",
    "IsoCTS",
    "IsoLoCo",
    "LocalSGD",
    "MergeStrategy",
]

__version__ = "0.1.0"

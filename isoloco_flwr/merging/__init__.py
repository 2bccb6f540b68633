"""Merges: pure functions from a stack of pseudo-gradients to one."""

from isoloco_flwr.merging.dare import dare, worker_generator
from isoloco_flwr.merging.iso_c import iso_c
from isoloco_flwr.merging.iso_cts import iso_cts
from isoloco_flwr.merging.mean import mean
from isoloco_flwr.merging.registry import (
    METHODS,
    MergeMethod,
    MergeOption,
    check_options,
    merge,
)
from isoloco_flwr.merging.ties import ties
from isoloco_flwr.merging.tsv import tsv

__all__ = [
    "METHODS",
    "MergeMethod",
    "MergeOption",
    "check_options",
    "dare",
    "iso_c",
    "iso_cts",
    "mean",
    "merge",
    "ties",
    "tsv",
    "worker_generator",
]

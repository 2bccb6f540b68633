"""Merges: pure functions from a stack of pseudo-gradients to one."""

from isoloco_flwr.merging.iso_c import iso_c
from isoloco_flwr.merging.mean import mean
from isoloco_flwr.merging.registry import (
    METHODS,
    MergeMethod,
    MergeOption,
    check_options,
    merge,
)

__all__ = ["METHODS", "MergeMethod", "MergeOption", "check_options", "iso_c", "mean", "merge"]

"""The published outer-step recipes, by name: a merge and an outer optimizer each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True)
class Preset:
    """One recipe for the outer step (arXiv 2607.03011; best rates at 178M, R = 8, H = 30)."""

    merge: str
    """Name of the merge in `isoloco_flwr.merging.METHODS`."""
    outer_lr: float
    """Learning rate of the outer optimizer."""
    outer_momentum: float = 0.0
    """Momentum of the outer optimizer, 0 <= momentum < 1."""
    nesterov: bool = False
    """Whether the outer momentum is Nesterov's."""
    merge_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the merge; those left out take the merge's defaults."""


PRESETS: dict[str, Preset] = {
    "local-sgd": Preset("mean", outer_lr=1.6),
    "diloco": Preset("mean", outer_lr=0.7, outer_momentum=0.9, nesterov=True),
    "iso-c": Preset("iso_c", outer_lr=2.1),
    "isoloco": Preset("iso_c", outer_lr=1.8, outer_momentum=0.8, nesterov=True),
    "iso-cts": Preset("iso_cts", outer_lr=3.1, merge_options={"common_space_fraction": 0.8}),
    "tsv-m": Preset("tsv", outer_lr=0.6),
    "ties": Preset("ties", outer_lr=0.7, merge_options={"sparsity": 0.1}),
    "dare": Preset("dare", outer_lr=1.5, merge_options={"sparsity": 0.1}),
}

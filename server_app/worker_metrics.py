"""The workers' metrics of a round in one record."""

from collections.abc import Sequence
from typing import cast

from flwr.app import MetricRecord, RecordDict

__all__ = ["aggregate_worker_metrics"]

_SUMS = ("num-examples", "inner-steps", "skipped-steps", "state-lost", "rounds-missed")
"""What counts something; all else is a mean."""


def aggregate_worker_metrics(contents: Sequence[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Add up what counts, average the training loss by sequences and all else over the workers.

    A `train_metrics_aggr_fn` for `MergeStrategy`; sites may do different numbers of inner steps.

    Parameters
    ----------
    contents : Sequence[RecordDict]
        One MetricRecord each, all with the same keys.
    weighted_by_key : str
        Key of the number of sequences.
    """
    records = [
        cast(dict[str, float], next(iter(content.metric_records.values()))) for content in contents
    ]
    examples = [record[weighted_by_key] for record in records]
    aggregated: dict[str, int | float | list[int] | list[float]] = {}
    for key in records[0]:
        values = [record[key] for record in records]
        if key in _SUMS:
            aggregated[key] = sum(values)
        elif key == "train-loss":
            weighted = (value * weight for value, weight in zip(values, examples, strict=True))
            aggregated[key] = sum(weighted) / sum(examples)
        else:
            aggregated[key] = sum(values) / len(values)
    return MetricRecord(aggregated)

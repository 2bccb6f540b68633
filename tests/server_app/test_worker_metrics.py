"""Workers' metrics of a round, where sites did different numbers of inner steps."""

import pytest
from flwr.app import MetricRecord, RecordDict

from server_app.worker_metrics import aggregate_worker_metrics


def test_counts_are_added_and_the_loss_weighs_by_sequences():
    contents = [
        RecordDict({"metrics": MetricRecord(dict(zip(KEYS, values, strict=True)))})
        for values in ((30, 15, 2.0, 1, 0.5), (10, 5, 4.0, 0, 1.5))
    ]
    total = aggregate_worker_metrics(contents, "num-examples")
    assert dict(total) == {
        "num-examples": 40,
        "inner-steps": 20,
        "train-loss": pytest.approx(2.5),
        "skipped-steps": 1,
        "epochs": 1.0,
    }


KEYS = ("num-examples", "inner-steps", "train-loss", "skipped-steps", "epochs")

"""The golden rounds, number for number, through the strategy itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rounds import ask, record, reply, tensors

from isoloco_flwr import MergeStrategy
from isoloco_flwr.merging import METHODS

CASES = json.loads((Path(__file__).parents[1] / "data" / "merging.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case(case):
    outer = case["outer"]
    strategy = MergeStrategy(
        merge=case["method"],
        merge_options=case["options"],
        outer_lr=outer["lr"],
        outer_momentum=outer["momentum"],
        nesterov=outer["nesterov"],
        orthogonalize=case.get("orthogonalize", "gradient"),
    )
    expected_rounds = case["params_after_each_round"]
    parameter = torch.zeros(np.shape(expected_rounds[0]), dtype=torch.float64)
    for number, (deltas, expected) in enumerate(
        zip(case["rounds"], expected_rounds, strict=True), start=1
    ):
        messages = ask(
            strategy, record({"weight": parameter}), num_nodes=len(deltas), server_round=number
        )
        replies = [
            reply(message, {"weight": parameter - torch.tensor(delta, dtype=torch.float64)})
            for message, delta in zip(messages, deltas, strict=True)
        ]
        arrays, _ = strategy.aggregate_train(number, replies)
        parameter = tensors(arrays)["weight"]
        np.testing.assert_allclose(parameter.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_the_cases_cover_every_deterministic_merge():
    assert {case["method"] for case in CASES} == set(METHODS) - {"dare"}

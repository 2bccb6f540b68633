"""Merges and outer steps against the published algorithm's numbers, in float64."""

import json
from pathlib import Path

import pytest
import torch

from isoloco_flwr.merging import merge

CASES = json.loads((Path(__file__).parents[1] / "data" / "merging.json").read_text())


def outer_step(parameter, direction, optimizer):
    parameter.grad = direction
    optimizer.step()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_parameters_after_each_round(case):
    shape = torch.tensor(case["params_after_each_round"][0]).shape
    theta = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=False)
    updates_first = case.get("orthogonalize") == "update"
    # Momentum first: a parameter that starts at 0 and steps with rate 1 moves by -direction.
    outer = case["outer"] | ({"lr": 1.0} if updates_first else {})
    optimizer = torch.optim.SGD([theta], **outer)
    position = torch.zeros(shape, dtype=torch.float64)

    for deltas, expected in zip(case["rounds"], case["params_after_each_round"], strict=True):
        stack = torch.tensor(deltas, dtype=torch.float64)
        if updates_first:
            before = theta.clone()
            outer_step(theta, merge("mean", stack), optimizer)
            direction = (before - theta)[None]
            position -= case["outer"]["lr"] * merge(case["method"], direction, **case["options"])
        else:
            outer_step(theta, merge(case["method"], stack, **case["options"]), optimizer)
            position = theta.clone()
        want = torch.tensor(expected, dtype=torch.float64)
        assert torch.linalg.vector_norm(position - want) <= 1e-9 * torch.linalg.vector_norm(want)


def test_every_published_merge_has_a_case():
    assert {case["method"] for case in CASES} == {"mean", "iso_c", "iso_cts", "tsv", "ties"}

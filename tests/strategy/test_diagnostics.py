"""What the merge saw, against the same figures by hand in NumPy."""

import itertools
import math

import numpy as np
import pytest
import torch
from rounds import ask, record, reply

from isoloco_flwr import TIES, DiLoCo, IsoLoCo, MergeStrategy
from isoloco_flwr.diagnostics import spectrum
from isoloco_flwr.merging import METHODS, merge

WORKERS = 5
NAME = "layers.0.q.weight"


def deltas(seed=0):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(6, 9, generator=generator)
    return [common + torch.randn(6, 9, generator=generator) for _ in range(WORKERS)]


def figures_of(strategy, values, server_round=1):
    sent = {NAME: torch.zeros(6, 9), "norm.weight": torch.zeros(4), "other": torch.zeros(6, 9)}
    messages = ask(strategy, record(sent), num_nodes=len(values), server_round=server_round)
    replies = [
        reply(message, {**sent, NAME: -value, "other": value})
        for message, value in zip(messages, values, strict=True)
    ]
    strategy.aggregate_train(server_round, replies)
    return strategy.engine.figures


def by_hand(values, merged):
    values = [value.double().numpy() for value in values]
    norms = [np.linalg.norm(value) for value in values]
    cosines = [
        (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in itertools.combinations(values, 2)
    ]
    mean = np.mean(values, axis=0)

    def condition(matrix):
        number = np.linalg.cond(matrix)
        return number if number < 1e6 else None  # TSV-M leaves this one a rank of 5 of 6

    def effective_rank(matrix):
        shares = np.linalg.svd(matrix, compute_uv=False)
        shares = shares / shares.sum()
        return math.exp(-(shares * np.log(shares)).sum())

    return {
        "cosine": np.mean(cosines),
        "mean-norm": np.mean(norms),
        "smallest-norm": min(norms),
        "largest-norm": max(norms),
        "norm-of-mean": np.linalg.norm(mean),
        "interference": np.linalg.norm(mean) / np.mean(norms),
        "effective-rank-mean": effective_rank(mean),
        "condition-mean": condition(mean),
        "effective-rank-merged": effective_rank(merged.double().numpy()),
        "condition-merged": condition(merged.double().numpy()),
    }


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dare"])
def test_the_figures_are_those_by_hand(method):
    strategy = MergeStrategy(merge=method, diagnostics=["*.q.weight"])
    figures = figures_of(strategy, deltas())
    assert figures.keys() == {NAME}
    expected = by_hand(deltas(), merge(method, torch.stack(deltas())))
    undefined = {key for key, value in expected.items() if value is None}
    assert {key for key, value in figures[NAME].items() if value is None} == undefined
    for key in expected.keys() - undefined:
        assert figures[NAME][key] == pytest.approx(expected[key], rel=1e-4), key
    assert figures[NAME].keys() == expected.keys()


def test_iso_c_makes_the_spectrum_flat_and_workers_that_agree_do_not_interfere():
    same = [deltas()[0]] * 3
    figures = figures_of(IsoLoCo(diagnostics=["*"]), same)[NAME]
    assert figures["cosine"] == pytest.approx(1)
    assert figures["interference"] == pytest.approx(1)
    assert figures["effective-rank-merged"] == pytest.approx(6, rel=1e-4)
    assert figures["condition-merged"] == pytest.approx(1, rel=1e-3)


def test_vectors_are_not_looked_at_and_nothing_is_unless_asked_for():
    assert figures_of(DiLoCo(diagnostics=["*"]), deltas()).keys() == {NAME, "other"}
    assert figures_of(DiLoCo(), deltas()) == {}


def test_a_round_that_is_skipped_leaves_no_figures_of_the_one_before():
    strategy = IsoLoCo(diagnostics=["*"], min_train_replies=3)
    assert figures_of(strategy, deltas())
    assert figures_of(strategy, deltas()[:2], server_round=2) == {}


def test_what_is_not_defined_is_none():
    assert spectrum(torch.zeros(3, 4)) == (None, None)
    rank, condition = spectrum(torch.ones(3, 4))
    assert rank == pytest.approx(1)
    assert condition is None
    alone = DiLoCo(diagnostics=["*"], min_train_nodes=1, min_available_nodes=1)
    figures = figures_of(alone, [torch.zeros(6, 9)])[NAME]
    assert figures["cosine"] is None
    assert figures["interference"] is None


@pytest.mark.parametrize("make", [IsoLoCo, TIES])
def test_a_reply_that_is_left_out_is_not_in_the_figures(make):
    values = deltas()
    sent = {NAME: torch.zeros(6, 9), "norm.weight": torch.zeros(4)}
    strategy = make(diagnostics=[NAME])
    messages = ask(strategy, record(sent), num_nodes=WORKERS)
    replies = [
        reply(message, {**sent, NAME: -value})
        for message, value in zip(messages, values, strict=True)
    ]
    bad = {NAME: -values[2], "norm.weight": torch.tensor([0.0, 0.0, math.nan, 0.0])}
    replies[2] = reply(messages[2], bad)
    _, metrics = strategy.aggregate_train(1, replies)
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (WORKERS - 1, 1)
    alone = make(diagnostics=[NAME])
    expected = figures_of(alone, values[:2] + values[3:])
    assert strategy.engine.figures == expected

"""On the same replies our strategies are Flower's, where theory says so."""

import pytest
import torch
from flwr.serverapp.strategy import FedAvg, FedAvgM
from rounds import ask, random_model, record, reply, tensors

from isoloco_flwr import LocalSGD, MergeStrategy


def run(strategy, num_rounds=3, num_nodes=5, weights=(1, 1, 1, 1, 1)):
    """Run rounds in which every worker moves the model it got by its own random step."""
    arrays = record(random_model(0))
    for server_round in range(1, num_rounds + 1):
        messages = ask(strategy, arrays, num_nodes=num_nodes, server_round=server_round)
        # Flower's strategies sample in random order: a worker is known by its node.
        replies = []
        for message in sorted(messages, key=lambda message: message.metadata.dst_node_id):
            node = message.metadata.dst_node_id - 101
            step = random_model(100 * server_round + node)
            sent = tensors(message.content["arrays"])
            replies.append(
                reply(
                    message,
                    {name: value - 0.1 * step[name] for name, value in sent.items()},
                    {"num-examples": weights[node], "loss": float(node)},
                )
            )
        arrays, metrics = strategy.aggregate_train(server_round, replies)
    return tensors(arrays), metrics


def assert_same(ours, flowers):
    for name, expected in flowers.items():
        assert ours[name].dtype == expected.dtype
        torch.testing.assert_close(ours[name], expected, rtol=1e-6, atol=1e-6)


def test_local_sgd_with_rate_1_is_fedavg():
    ours, our_metrics = run(LocalSGD(outer_lr=1.0))
    flowers, flowers_metrics = run(FedAvg())
    assert_same(ours, flowers)
    assert our_metrics["loss"] == pytest.approx(flowers_metrics["loss"])


def test_weighting_by_examples_is_fedavgs():
    weights = (3, 1, 0, 7, 2)
    ours, our_metrics = run(LocalSGD(outer_lr=1.0, weighting="examples"), weights=weights)
    flowers, flowers_metrics = run(FedAvg(), weights=weights)
    assert_same(ours, flowers)
    assert our_metrics["loss"] == pytest.approx(flowers_metrics["loss"])
    uniform, _ = run(LocalSGD(outer_lr=1.0), weights=weights)
    assert not torch.allclose(uniform["tall"], flowers["tall"], atol=1e-3)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.9), (0.5, 0.0), (0.7, 0.3)])
def test_mean_with_heavy_ball_is_fedavgm(lr, momentum):
    ours, _ = run(MergeStrategy(merge="mean", outer_lr=lr, outer_momentum=momentum, nesterov=False))
    flowers, _ = run(FedAvgM(server_learning_rate=lr, server_momentum=momentum))
    assert_same(ours, flowers)


def test_every_keyword_of_fedavg_has_its_default():
    import inspect

    flowers = inspect.signature(FedAvg).parameters
    ours = inspect.signature(MergeStrategy).parameters
    assert list(ours)[: len(flowers)] == list(flowers)
    for name, parameter in flowers.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind

"""The older API has the same arithmetic as the new one and as Flower's own strategies."""

import math

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg, FedAvgM
from rounds import ask, random_model, record, reply, tensors

from isoloco_flwr import IsoLoCo as MessageIsoLoCo
from isoloco_flwr.legacy import IsoLoCo, LocalSGD, MergeStrategy


class Client(ClientProxy):
    def get_properties(self, ins, timeout, group_id):
        raise AssertionError("not part of a round")

    def get_parameters(self, ins, timeout, group_id):
        raise AssertionError("not part of a round")

    def fit(self, ins, timeout, group_id):
        raise AssertionError("not part of a round")

    def evaluate(self, ins, timeout, group_id):
        raise AssertionError("not part of a round")

    def reconnect(self, ins, timeout, group_id):
        raise AssertionError("not part of a round")


CLIENTS = [Client(f"{place}") for place in range(4)]


def manager():
    clients = SimpleClientManager()
    for client in CLIENTS:
        clients.register(client)
    return clients


def arrays(model):
    return [np.asarray(value) for value in model.values()]


def result(model, num_examples=1):
    return FitRes(
        Status(Code.OK, ""), ndarrays_to_parameters(arrays(model)), num_examples, {"loss": 1.0}
    )


def worker_model(sent, server_round, worker):
    step = random_model(100 * server_round + worker)
    return {
        name: torch.as_tensor(value) - 0.1 * step[name]
        for name, value in zip(random_model(0), sent, strict=True)
    }


def run(strategy, num_examples=(1, 1, 1, 1), num_rounds=3):
    parameters = ndarrays_to_parameters(arrays(random_model(0)))
    for server_round in range(1, num_rounds + 1):
        strategy.configure_fit(server_round, parameters, manager())
        sent = parameters_to_ndarrays(parameters)
        results = [
            (client, result(worker_model(sent, server_round, worker), num_examples[worker]))
            for worker, client in enumerate(CLIENTS)
        ]
        parameters, metrics = strategy.aggregate_fit(server_round, results, [])
    return parameters_to_ndarrays(parameters), metrics


def assert_close(ours, flowers):
    for one, other in zip(ours, flowers, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_local_sgd_with_rate_1_is_fedavg():
    ours, metrics = run(LocalSGD(outer_lr=1.0, weighting="examples"), num_examples=(3, 1, 0, 7))
    flowers, _ = run(FedAvg(), num_examples=(3, 1, 0, 7))
    assert_close(ours, flowers)
    assert (metrics["replies-used"], metrics["replies-rejected"]) == (4, 0)


def test_mean_with_heavy_ball_is_fedavgm():
    initial = ndarrays_to_parameters(arrays(random_model(0)))
    ours, _ = run(MergeStrategy(merge="mean", outer_lr=0.5, outer_momentum=0.9, nesterov=False))
    flowers, _ = run(
        FedAvgM(server_learning_rate=0.5, server_momentum=0.9, initial_parameters=initial)
    )
    assert_close(ours, flowers)


def test_both_apis_give_the_same_bits():
    legacy, _ = run(IsoLoCo())
    strategy = MessageIsoLoCo()
    sent = record(random_model(0))
    for server_round in (1, 2, 3):
        messages = ask(strategy, sent, num_nodes=4, server_round=server_round)
        values = [value.numpy() for value in tensors(sent).values()]
        replies = [
            reply(message, worker_model(values, server_round, worker))
            for worker, message in enumerate(messages)
        ]
        sent, _ = strategy.aggregate_train(server_round, replies)
    for one, other in zip(legacy, tensors(sent).values(), strict=True):
        np.testing.assert_array_equal(one, other.numpy())


def nan_model():
    return {**random_model(1), "scalar": torch.tensor(math.nan)}


def short_model():
    return {name: value for name, value in random_model(1).items() if name != "scalar"}


def garbage():
    bad = result(random_model(1))
    bad.parameters.tensors[0] = b"garbage"
    return bad


@pytest.mark.parametrize(
    "bad", [lambda: result(nan_model()), lambda: result(short_model()), garbage]
)
def test_a_bad_result_leaves_no_trace(bad):
    parameters = ndarrays_to_parameters(arrays(random_model(0)))
    outcomes = []
    for extra in ([], [(CLIENTS[1], bad())]):
        strategy = IsoLoCo()
        strategy.configure_fit(1, parameters, manager())
        good = [(CLIENTS[place], result(random_model(place + 5))) for place in (0, 2, 3)]
        outcomes.append(strategy.aggregate_fit(1, good + extra, []))
    assert outcomes[0][0].tensors == outcomes[1][0].tensors
    assert outcomes[1][1]["replies-rejected"] == 1


@pytest.mark.parametrize(
    ("merge", "accepts"),
    [("mean", 1), ("iso_c", 1), ("iso_cts", 0), ("tsv", 0), ("ties", 0), ("dare", 0)],
)
def test_a_securely_aggregated_mean_is_refused_where_single_results_are_needed(merge, accepts):
    strategy = MergeStrategy(merge=merge)
    strategy.configure_fit(1, ndarrays_to_parameters(arrays(random_model(0))), manager())
    one_for_all = result(random_model(1)).parameters
    results = [(client, result(random_model(0))) for client in CLIENTS]
    for _, each in results:  # as Flower's workflows do
        each.parameters = one_for_all
    if accepts:
        parameters, _ = strategy.aggregate_fit(1, results, [])
        assert parameters is not None
    else:
        with pytest.raises(ValueError, match=f"'{merge}' needs each client's own.*mean, iso_c"):
            strategy.aggregate_fit(1, results, [])


def test_a_round_without_good_results_is_skipped():
    strategy = IsoLoCo()
    strategy.configure_fit(1, ndarrays_to_parameters(arrays(random_model(0))), manager())
    parameters, metrics = strategy.aggregate_fit(1, [(CLIENTS[0], garbage())], [RuntimeError("x")])
    assert parameters is None
    assert metrics["replies-rejected"] == 2
    assert strategy.engine.outer.state_dict() == {}

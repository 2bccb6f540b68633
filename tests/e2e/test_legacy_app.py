"""Somebody else's NumPyClient app in the older API, with the strategy replaced and nothing else."""

from itertools import pairwise

import numpy as np

APP = """
import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from isoloco_flwr import legacy


class LogisticRegression:
    def __init__(self, classes, features):
        self.coef_ = np.zeros((classes, features))
        self.intercept_ = np.zeros(classes)

    def predict_proba(self, x):
        scores = x @ self.coef_.T + self.intercept_
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return scores / scores.sum(axis=1, keepdims=True)

    def fit(self, x, y, steps=20, lr=0.2):
        for _ in range(steps):
            error = (self.predict_proba(x) - np.eye(len(self.intercept_))[y]) / len(x)
            self.coef_ -= lr * error.T @ x
            self.intercept_ -= lr * error.sum(axis=0)

    def score(self, x, y):
        return float((self.predict_proba(x).argmax(axis=1) == y).mean())


def load_data(partition):
    centres = np.random.default_rng(0).normal(size=(3, 4)) * 3
    rng = np.random.default_rng(partition + 1)
    y = rng.integers(3, size=40 + 30 * partition)
    return centres[y] + rng.normal(size=(len(y), 4)), y


def get_model_parameters(model):
    return [model.coef_, model.intercept_]


def set_model_params(model, parameters):
    model.coef_, model.intercept_ = (value.copy() for value in parameters)


class Client(NumPyClient):
    def __init__(self, partition):
        self.model = LogisticRegression(3, 4)
        self.x, self.y = load_data(partition)

    def fit(self, parameters, config):
        set_model_params(self.model, parameters)
        self.model.fit(self.x, self.y)
        return get_model_parameters(self.model), len(self.x), {}

    def evaluate(self, parameters, config):
        set_model_params(self.model, parameters)
        accuracy = self.model.score(self.x, self.y)
        return 1.0 - accuracy, len(self.x), {"accuracy": accuracy}


def client_fn(context: Context):
    return Client(context.node_config["partition-id"]).to_client()


def server_fn(context: Context):
    model = LogisticRegression(3, 4)

    def evaluate(server_round, parameters, config):
        np.savez(context.run_config["output"] + f"/{server_round}.npz", *parameters)
        set_model_params(model, parameters)
        return 0.0, {"accuracy": model.score(*load_data(9))}

    strategy = STRATEGY
        initial_parameters=ndarrays_to_parameters(get_model_parameters(model)),
        evaluate_fn=evaluate,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


client_app = ClientApp(client_fn=client_fn)
server_app = ServerApp(server_fn=server_fn)
"""

STRATEGIES = {
    "fedavg": "FedAvg(",
    "isoloco": "legacy.IsoLoCo(",
    "localsgd": 'legacy.LocalSGD(outer_lr=1.0, weighting="examples",',
}


def test_a_numpy_client_runs_unchanged(make_app, run, tmp_path):
    final = {}
    for name, strategy in STRATEGIES.items():
        app = make_app(name, APP.replace("STRATEGY", strategy), config='output = ""')
        output = tmp_path / f"{name}-output"
        output.mkdir()
        log = run(app, num_supernodes=3, run_config={"output": str(output)})
        assert (output / "2.npz").exists(), log
        rounds = [list(np.load(output / f"{place}.npz").values()) for place in range(3)]
        for before, after in pairwise(rounds):
            assert [(value.shape, value.dtype) for value in after] == [
                ((3, 4), np.float64),
                ((3,), np.float64),
            ]
            assert all(np.isfinite(value).all() for value in after)
            assert not any(
                np.array_equal(one, other) for one, other in zip(before, after, strict=True)
            )
        final[name] = rounds[-1]
    for ours, flowers in zip(final["localsgd"], final["fedavg"], strict=True):
        np.testing.assert_allclose(ours, flowers, rtol=1e-6, atol=1e-6)
    assert not np.allclose(final["isoloco"][0], final["fedavg"][0], rtol=1e-2)

"""Flower's SecAgg+ with the strategies of the older API: the mean's merges work, others refuse."""

import numpy as np

APP = """
import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from isoloco_flwr import legacy


class Client(NumPyClient):
    def __init__(self, place):
        self.place = place

    def fit(self, parameters, config):
        return [parameters[0] - 0.5 * np.eye(4) * (self.place + 1)], 10, {}


def client_fn(context: Context):
    return Client(context.node_config["partition-id"]).to_client()


client_app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
server_app = ServerApp()


@server_app.main()
def main(grid, context):
    output = context.run_config["output"]
    strategy = legacy.MergeStrategy(
        merge=context.run_config["merge"],
        outer_lr=1.0,
        outer_momentum=0.0,
        fraction_evaluate=0.0,
        min_available_clients=3,
        initial_parameters=ndarrays_to_parameters([np.zeros((4, 4))]),
        evaluate_fn=lambda number, arrays, _: np.save(f"{output}/{number}.npy", arrays[0]),
    )
    legacy_context = LegacyContext(
        context=context, config=ServerConfig(num_rounds=1), strategy=strategy
    )
    workflow = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2, timeout=120))
    workflow(grid, legacy_context)
"""


def test_merges_of_the_mean_work_and_others_refuse(make_app, run, tmp_path):
    app = make_app("secure", APP, config='output = ""\nmerge = ""')
    logs = {}
    for merge in ("iso_c", "ties"):
        output = tmp_path / merge
        output.mkdir()
        logs[merge] = run(app, num_supernodes=3, run_config={"output": str(output), "merge": merge})
    # The mean of the pseudo-gradients is the identity, which Iso-C leaves as it is. SecAgg+ rounds
    # at random to steps of 16 / 2**22, of values that are 10 (examples) / 1000 of what they mean.
    after = np.load(tmp_path / "iso_c" / "1.npy")
    np.testing.assert_allclose(after, -np.eye(4), atol=4e-4)
    assert "merge='ties' needs each client's own result" in logs["ties"]
    assert not (tmp_path / "ties" / "1.npy").exists()

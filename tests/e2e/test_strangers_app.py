"""Somebody else's app, with FedAvg replaced by IsoLoCo and nothing else touched."""

import pytest

APP = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from isoloco_flwr import IsoLoCo

client_app = ClientApp()
server_app = ServerApp()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 10),
    )


@client_app.train()
def train(msg: Message, context: Context):
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(context.node_config["partition-id"])
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Message(
        RecordDict({
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"train_loss": loss.item(), "num-examples": len(images)}),
        }),
        reply_to=msg,
    )


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = STRATEGY(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=2)
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["output"])
"""


@pytest.mark.parametrize("strategy", ["FedAvg", "IsoLoCo"])
def test_a_cnn_with_batch_norm_runs_unchanged(strategy, make_app, run, tmp_path):
    import torch

    app = make_app("strange", APP.replace("STRATEGY", strategy), config='output = ""')
    output = tmp_path / "model.pt"
    log = run(app, num_supernodes=2, run_config={"output": str(output)})
    assert output.exists(), log
    state = torch.load(output)
    assert state["1.num_batches_tracked"] == 10
    assert all(torch.isfinite(value).all() for value in state.values())
    assert (state["1.running_var"] > 0).all()

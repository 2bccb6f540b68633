"""Somebody else's fine-tuning app that sends LoRA adapters only, with FedAvg or IsoLoCo."""

import json

import torch

APP = """
import json

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from isoloco_flwr import IsoLoCo

client_app = ClientApp()
server_app = ServerApp()


class LoraLinear(torch.nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        attended = torch.nn.functional.scaled_dot_product_attention(
            self.q_proj(x), self.k_proj(x), self.v_proj(x)
        )
        return x + attended


class Base(torch.nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 5)

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return self.head(x)


class PeftModel(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_model = base.requires_grad_(False)
        for layer in base.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer, name, LoraLinear(getattr(layer, name), rank=4, alpha=8))

    def forward(self, x):
        return self.base_model(x)


def get_model():
    torch.manual_seed(0)
    return PeftModel(Base())


def get_peft_model_state_dict(model):
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


def set_peft_model_state_dict(model, adapters):
    unexpected = model.load_state_dict(adapters, strict=False).unexpected_keys
    assert not unexpected, unexpected


@client_app.train()
def train(msg: Message, context: Context):
    model = get_model()
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    torch.manual_seed(context.node_config["partition-id"])
    x, y = torch.randn(16, 6, 16), torch.randint(5, (16, 6))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(msg.content["config"]["local-steps"]):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = {"train_loss": loss.item(), "num-examples": len(x)}
    content = {
        "arrays": ArrayRecord(get_peft_model_state_dict(model)),
        "metrics": MetricRecord(metrics),
    }
    return Message(RecordDict(content), reply_to=msg)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = STRATEGY(fraction_evaluate=0.0)
    result = strategy.start(
        grid,
        ArrayRecord(get_peft_model_state_dict(get_model())),
        num_rounds=2,
        train_config=ConfigRecord({"local-steps": 5}),
    )
    output = context.run_config["output"]
    torch.save(get_peft_model_state_dict(get_model()), f"{output}/initial.pt")
    torch.save(result.arrays.to_torch_state_dict(), f"{output}/adapters.pt")
    losses = [dict(metrics) for metrics in result.train_metrics_clientapp.values()]
    with open(f"{output}/metrics.json", "w") as file:
        json.dump(losses, file)
"""

NAMES = [
    f"base_model.model.layers.{layer}.{projection}.lora_{side}.weight"
    for layer in (0, 1)
    for projection in ("q_proj", "v_proj")
    for side in ("A", "B")
]


def test_adapters_alone_are_merged(make_app, run, tmp_path):
    for strategy in ("FedAvg", "IsoLoCo"):
        app = make_app(
            f"peft{strategy.lower()}", APP.replace("STRATEGY", strategy), config='output = ""'
        )
        output = tmp_path / strategy
        output.mkdir()
        log = run(app, num_supernodes=2, run_config={"output": str(output)})
        assert (output / "metrics.json").exists(), log
        initial, final = (torch.load(output / f"{name}.pt") for name in ("initial", "adapters"))
        assert sorted(final) == sorted(initial) == sorted(NAMES)
        for name, value in final.items():
            assert (value.shape, value.dtype) == (initial[name].shape, torch.float32), name
            assert torch.isfinite(value).all(), name
            assert not torch.equal(value, initial[name]), name
        metrics = json.loads((output / "metrics.json").read_text())
        assert len(metrics) == 2
        if strategy == "IsoLoCo":
            assert [round_["replies-used"] for round_ in metrics] == [2, 2]
            sent = sum(4 * value.numel() for value in initial.values())
            # Headers of .npy files come on top: the base stays at home.
            assert sent < metrics[0]["bytes-up"] / 2 < sent + 256 * len(initial)

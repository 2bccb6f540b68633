"""The inner optimizers, over groups of parameters that each have a peak learning rate."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = [
    "ADAMW_BETAS",
    "MULOCO_MOMENTUM",
    "MULOCO_NESTEROV",
    "MuonWithAdamW",
    "build_inner_optimizer",
    "hidden_matrices",
]

ADAMW_BETAS = (0.9, 0.95)
"""Decay of AdamW's moments (arXiv 2607.03011; also MuLoCo's for what Muon does not train)."""

MULOCO_MOMENTUM = 0.95
"""Muon's momentum in MuLoCo (arXiv 2505.23725, github.com/bentherien/muloco-1)."""

MULOCO_NESTEROV = False
"""MuLoCo orthogonalizes the momentum itself, without Nesterov's look ahead (same source)."""


class _Float32OnCPU(TorchFunctionMode):
    """Keeps CPU tensors in float32 that are to become bfloat16.

    `torch.optim.Muon` orthogonalizes in bfloat16. Most CPUs have no arithmetic for it, and torch
    multiplies bfloat16 matrices about 300 times slower than float32 ones there.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is Tensor.bfloat16 and arguments[0].device.type == "cpu":
            return arguments[0].clone()
        return function(*arguments, **(keywords or {}))


class MuonWithAdamW(Optimizer):
    """Muon on some parameters and AdamW on the others, as one optimizer.

    Parameters
    ----------
    muon_groups, adamw_groups : list[dict[str, Any]]
        Groups of parameters with the options of `torch.optim.Muon` and `torch.optim.AdamW`.

    Notes
    -----
    `param_groups` has Muon's groups first. Parts and whole share groups and state, so that a
    changed learning rate and a loaded state reach the part that uses them. On a CPU Muon computes
    in float32.
    """

    def __init__(
        self, muon_groups: list[dict[str, Any]], adamw_groups: list[dict[str, Any]]
    ) -> None:
        self._muon = torch.optim.Muon(muon_groups)
        self._adamw = torch.optim.AdamW(adamw_groups)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        count = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of both."""
        with _Float32OnCPU():
            self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()


def build_inner_optimizer(
    name: str, model: PreTrainedModel, *, lr: float, weight_decay: float = 0.1
) -> Optimizer:
    """Make an inner optimizer over all parameters of a model that are trained.

    Parameters
    ----------
    name : {"adamw", "muon", "sgd"}
        "adamw" is AdamW with `ADAMW_BETAS`. "muon" is Muon with MuLoCo's settings on
        `hidden_matrices` and that AdamW on the rest. "sgd" is plain: no momentum, no weight decay.
    model : PreTrainedModel
        A causal language model.
    lr : float
        Peak learning rate, every group's `peak_lr`. Muon's updates are scaled to the root mean
        square of AdamW's (arXiv 2502.16982), so that one rate serves both.
    weight_decay : float
        Decoupled weight decay of the matrices; norms and biases have none.

    Returns
    -------
    Optimizer
        `state_dict` and `load_state_dict` work with `save_worker_state` and `load_worker_state`.

    Raises
    ------
    ValueError
        If the name is unknown.

    Notes
    -----
    AdamW is fused on CPU as well: a third of the time, and the same bits whatever the threads.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD([{"params": trained, "lr": lr, "peak_lr": lr}])
    common = {"lr": lr, "peak_lr": lr}
    muon = {
        "weight_decay": weight_decay,
        "momentum": MULOCO_MOMENTUM,
        "nesterov": MULOCO_NESTEROV,
        "adjust_lr_fn": "match_rms_adamw",
    }
    adamw = {"betas": ADAMW_BETAS, "fused": True}

    def adamw_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Group by weight decay; an empty group would be stored as if it had a state."""
        groups = [
            ([value for value in parameters if value.ndim >= 2], weight_decay),
            ([value for value in parameters if value.ndim < 2], 0.0),
        ]
        return [
            {"params": values, "weight_decay": decay, **adamw, **common}
            for values, decay in groups
            if values
        ]

    if name == "adamw":
        return torch.optim.AdamW(adamw_groups(trained))
    if name == "muon":
        hidden = hidden_matrices(model)
        own = {id(parameter) for parameter in hidden.values()}
        return MuonWithAdamW(
            [{"params": list(hidden.values()), **muon, **common}],
            adamw_groups([parameter for parameter in trained if id(parameter) not in own]),
        )
    raise ValueError(f"inner optimizer {name!r}: allowed is one of adamw, muon, sgd")


def hidden_matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained weights of linear maps between hidden activations, by name.

    For a Llama these are the projections q, k, v, o, gate, up and down of every layer: not the
    embedding, not the output head, even where the two are one.
    """
    head = model.get_output_embeddings()
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and module.weight.requires_grad
    }

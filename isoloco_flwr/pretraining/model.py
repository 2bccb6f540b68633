"""Llama models by size, and any other causal language model by its folder or config."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

__all__ = [
    "DEFAULT_CONTEXT",
    "MODEL_PRESETS",
    "ModelShape",
    "build_model",
    "context_length",
    "load_tensors",
    "model_tensors",
]

DEFAULT_CONTEXT = 2048
"""Tokens of a sequence for a model that takes more, or does not say (arXiv 2607.03011)."""


@dataclass(frozen=True)
class ModelShape:
    """The size of a Llama model."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads."""
    mlp: int
    """Width of the gated MLP."""
    context: int
    """Tokens of a sequence."""
    key_value_heads: int | None = None
    """Heads of keys and values; None: as many as attention heads."""


MODEL_PRESETS: dict[str, ModelShape] = {
    "demo": ModelShape(hidden=96, layers=3, heads=4, mlp=256, context=128),
    "3M": ModelShape(hidden=192, layers=6, heads=6, mlp=512, context=256),
    "30M": ModelShape(hidden=512, layers=8, heads=8, mlp=1408, context=512),
    # arXiv 2607.03011
    "178M": ModelShape(hidden=1024, layers=9, heads=8, mlp=2688, context=2048),
    "512M": ModelShape(hidden=1536, layers=12, heads=12, mlp=5440, context=2048),
    # TinyLlama, arXiv 2401.02385: 1.10 B parameters with a vocabulary of 32,000
    "1B": ModelShape(hidden=2048, layers=22, heads=32, mlp=5632, context=2048, key_value_heads=4),
}
"""Shapes by name."""


def build_model(
    preset: str, *, vocabulary_size: int, seed: int, path: str = "", config: str = ""
) -> PreTrainedModel:
    """Make a causal language model in float32.

    Parameters
    ----------
    preset : str
        Name in `MODEL_PRESETS`; not looked at with `path` or `config`.
    vocabulary_size : int
        Entries of the tokenizer's vocabulary. A preset's vocabulary is as large; that of `path` or
        `config` may be larger.
    seed : int
        Decides random weights; the global random state is neither read nor changed.
    path : str
        Folder of a model in `save_pretrained` form, whose weights it starts from.
    config : str
        A config.json of transformers, whose model starts from random weights.

    Raises
    ------
    ValueError
        If the preset is unknown, path and config are both given, nothing that can be used is there,
        or its vocabulary is too small for the tokenizer's.
    """
    if path and config:
        raise ValueError(
            f"model.path = {path!r} and model.config = {config!r}: allowed is one of the two"
        )
    if path:
        return _load(Path(path), vocabulary_size, seed)
    if config:
        own = _read_config("model.config", Path(config), vocabulary_size)
        try:
            with _seeded(seed):
                made: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
            return made
        except ValueError as error:  # the type of model has no causal form
            raise _unusable("model.config", config, error) from error
    if preset not in MODEL_PRESETS:
        raise ValueError(f"model.preset = {preset!r}: allowed is one of {', '.join(MODEL_PRESETS)}")
    shape = MODEL_PRESETS[preset]
    llama = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads or shape.heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary_size - 1,
    )
    with _seeded(seed):
        return LlamaForCausalLM(llama)


def context_length(model: PreTrainedModel, limit: int = 0) -> int:
    """Return how many tokens the sequences have that a model is trained on.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    limit : int
        Most tokens; 0 takes `DEFAULT_CONTEXT`.

    Returns
    -------
    int
        The limit, or the model's own longest context where that is shorter. Some models have none
        (state-space models) or one far longer than anybody trains on.
    """
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = limit or DEFAULT_CONTEXT
    return min(own, most) if own and own > 0 else most


def _load(folder: Path, vocabulary_size: int, seed: int) -> PreTrainedModel:
    _read_config("model.path", folder, vocabulary_size)
    loader: Any = AutoModelForCausalLM
    try:
        with _seeded(seed):  # loading draws what it then overwrites
            model: PreTrainedModel
            model, report = loader.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unusable("model.path", folder, error) from error
    random = sorted(report["missing_keys"]) + [name for name, *_ in report["mismatched_keys"]]
    if random:
        raise ValueError(
            f"model.path = '{folder}': {len(random)} weights are missing or mis-shaped, "
            f"{random[0]} among them"
        )
    model.train()  # as a model made from a config is
    return model


def _read_config(key: str, path: Path, vocabulary_size: int) -> PreTrainedConfig:
    """Read a model's config and check its vocabulary before any memory is taken."""
    if not path.exists():  # transformers would take it for the name of a model on the hub
        raise ValueError(f"{key} = '{path}': there is no such file or folder")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
        entries = config.get_text_config().vocab_size
    except (OSError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise _unusable(key, path, error) from error
    if entries < vocabulary_size:
        raise ValueError(
            f"{key} = '{path}': the model's vocabulary has {entries} entries, too few for the "
            f"{vocabulary_size} of the tokenizer's (data.tokenizer)"
        )
    return config


def _unusable(key: str, path: str | Path, error: Exception) -> ValueError:
    reason = shorten(str(error), 240, placeholder=" ...")
    return ValueError(f"{key} = '{path}': not a causal language model of transformers: {reason}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from a generator of its own inside."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every GPU as well, which fork_rng does not put back.
        torch.default_generator.manual_seed(seed)
        yield


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name, each once: tied weights have their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor
    return tensors


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model; the inverse of `model_tensors`.

    Raises
    ------
    ValueError
        If a tensor is missing, unknown or mis-shaped; the model is as it was then.
    """
    own = model_tensors(model)
    wrong = own.keys() ^ tensors.keys() or {
        name for name, tensor in own.items() if tensor.shape != tensors[name].shape
    }
    if wrong:
        raise ValueError(f"tensors missing, unknown or mis-shaped: {', '.join(sorted(wrong))}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

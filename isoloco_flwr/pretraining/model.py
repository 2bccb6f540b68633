"""Llama models by size."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["MODEL_PRESETS", "ModelShape", "build_model", "load_tensors", "model_tensors"]


@dataclass(frozen=True)
class ModelShape:
    """The size of a Llama model."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads; keys and values have as many."""
    mlp: int
    """Width of the gated MLP."""
    context: int
    """Tokens of a sequence."""


MODEL_PRESETS: dict[str, ModelShape] = {
    "demo": ModelShape(hidden=96, layers=3, heads=4, mlp=256, context=128),
    "3M": ModelShape(hidden=192, layers=6, heads=6, mlp=512, context=256),
    "30M": ModelShape(hidden=512, layers=8, heads=8, mlp=1408, context=512),
    # arXiv 2607.03011
    "178M": ModelShape(hidden=1024, layers=9, heads=8, mlp=2688, context=2048),
    "512M": ModelShape(hidden=1536, layers=12, heads=12, mlp=5440, context=2048),
}
"""Shapes by name."""


def build_model(preset: str, *, vocabulary_size: int, seed: int) -> LlamaForCausalLM:
    """Make a Llama with random weights in float32.

    Parameters
    ----------
    preset : str
        Name in `MODEL_PRESETS`.
    vocabulary_size : int
        Entries of the tokenizer's vocabulary.
    seed : int
        Decides the weights; the global random state is neither read nor changed.

    Raises
    ------
    ValueError
        If the preset is unknown.
    """
    if preset not in MODEL_PRESETS:
        raise ValueError(f"model {preset!r}: allowed is one of {', '.join(MODEL_PRESETS)}")
    shape = MODEL_PRESETS[preset]
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary_size - 1,
    )
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every GPU as well, which fork_rng does not put back.
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config)


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

"""How a model is executed: arithmetic, compilation, gradient checkpointing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

__all__ = ["PRECISIONS", "flush_subnormals", "prepare_model", "resolve_precision"]

PRECISIONS = ("auto", "fp32", "bf16")
"""Arithmetic of forward and backward."""


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the arithmetic that is used on a device: "fp32" or "bf16".

    Parameters
    ----------
    precision : {"auto", "fp32", "bf16"}
        "auto" is bf16 on a GPU that computes in it, else fp32.
    device : torch.device
        Where the model is.

    Raises
    ------
    ValueError
        If the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: allowed is one of {', '.join(PRECISIONS)}")
    if precision != "auto":
        return precision
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def prepare_model(
    model: PreTrainedModel,
    *,
    compile: bool = False,
    gradient_checkpointing: bool = False,
    tf32: bool = True,
) -> PreTrainedModel:
    """Set up a model for training, once a process.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place: it stays the same object, with the same parameters and names, so that
        weights loaded into it later are the compiled model's.
    compile : bool
        Whether all but the output head and the loss goes through `torch.compile`; compilation
        itself happens at the first batch. A second call compiles anew.
    gradient_checkpointing : bool
        Whether a layer's activations are computed again in the backward pass instead of kept.
    tf32 : bool
        Whether this process may multiply float32 matrices in TF32 on GPUs.

    Returns
    -------
    PreTrainedModel
        The model.

    Raises
    ------
    ValueError
        If the model has no gradient checkpointing.
    """
    if next(model.parameters()).is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(
                f"gradient checkpointing: {type(model).__name__} has none, allowed is false"
            )
        with warnings.catch_warnings():
            # Its new name is missing in older releases of transformers 5.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if compile:
        model.base_model.compile()
    return model


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Take float32 results below 1.2e-38 for zero, on a CPU that can, and leave it as it was.

    CPUs take many times as long over such numbers. They come up where a worker is sure that some
    tokens never occur, in the gradients of their logits and in Adam's moments.
    """
    before = (torch.tensor(1e-38) * 0.1).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)

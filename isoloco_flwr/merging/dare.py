"""DARE: drop entries at random, rescale the others."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from isoloco_flwr.merging.stack import as_stack, kept_count, largest

__all__ = ["dare", "worker_generator"]


@torch.no_grad()
def dare(
    deltas: Tensor,
    sparsity: float = 0.1,
    generator: Generator | Sequence[Generator] | None = None,
) -> Tensor:
    """Average pseudo-gradients thinned out at random (DARE, arXiv 2311.03099).

    Of each worker max(1, int((1 − sparsity) · numel)) entries are kept, chosen uniformly, and
    rescaled by 1 / (1 − sparsity).

    Parameters
    ----------
    deltas : Tensor
        Stack of shape (R, *shape), floating point.
    sparsity : float
        Share of the entries that is dropped, 0 <= sparsity < 1.
    generator : Generator | Sequence[Generator] | None
        Source of the choice, on the CPU: one for all workers in turn, or one for each
        (`worker_generator`); None is torch's global one.

    Returns
    -------
    Tensor
        Shape (*shape), the stack's dtype and device.

    Raises
    ------
    ValueError
        If R = 0, the dtype is not floating point, a value is not finite, or the generators are
        not R.
    """
    stack = as_stack("dare", deltas)
    sources = [generator] * len(stack) if not isinstance(generator, Sequence) else generator
    if len(sources) != len(stack):
        raise ValueError(f"dare: {len(sources)} generators for {len(stack)} workers")
    merged = torch.zeros_like(stack[0]).reshape(-1)
    keep = kept_count(merged.numel(), sparsity)
    for delta, source in zip(stack, sources, strict=True):
        # Drawn on the CPU, so that a seed means the same entries on every device.
        lots = torch.rand(merged.numel(), generator=source)
        merged += delta.reshape(-1) * largest(lots, keep).to(delta.device)
    merged /= len(stack) * (1 - sparsity)
    return merged.reshape(stack.shape[1:]).to(deltas.dtype)


def worker_generator(seed: int, round_number: int, worker: int, parameter: str) -> Generator:
    """Return the generator of one worker's choice for one parameter in one round.

    A pure function of its arguments, whatever else was drawn before; different arguments give
    independent generators.
    """
    key = repr((seed, round_number, worker, parameter)).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

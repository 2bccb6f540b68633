"""The inner learning rate over all inner steps of a run."""

import math

__all__ = ["learning_rate_factor"]

WARMUP_FRACTION = 0.1


def learning_rate_factor(step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate: linear warm-up, then cosine to zero.

    Parameters
    ----------
    step : int
        Inner step, counted from 0 over the whole run.
    total_steps : int
        Inner steps of the whole run.

    Returns
    -------
    float
        (step + 1) / w in the first w = max(1, round(total_steps / 10)) steps, so that the first
        step moves and step w - 1 has the peak; then the half cosine that would reach 0 at
        `total_steps` (arXiv 2607.03011).

    Raises
    ------
    ValueError
        If the step is not one of the run's.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step}: allowed is 0 <= step < {total_steps}")
    warmup = max(1, round(total_steps * WARMUP_FRACTION))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total_steps + 1 - warmup)))

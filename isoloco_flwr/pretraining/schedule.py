"""The inner learning rate over all inner steps of a run."""

import math

__all__ = ["SCHEDULES", "WARMUP_FRACTION", "WSD_DECAY_FRACTION", "learning_rate_factor"]

SCHEDULES = ("cosine", "constant", "wsd")
"""What the rate does after its warm-up."""

WARMUP_FRACTION = 0.1
"""Share of all inner steps that warm up (arXiv 2607.03011)."""

WSD_DECAY_FRACTION = 0.2
"""Share of all inner steps over which "wsd" decays (arXiv 2405.18392)."""


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    schedule: str = "cosine",
    warmup_fraction: float = WARMUP_FRACTION,
) -> float:
    """Return the factor on the peak learning rate.

    Parameters
    ----------
    step : int
        Inner step, counted from 0 over the whole run.
    total_steps : int
        Inner steps of the whole run.
    schedule : {"cosine", "constant", "wsd"}
        "cosine" goes down the half cosine that would reach 0 at `total_steps` (arXiv 2607.03011);
        "constant" stays; "wsd" (warm-up, stable, decay: arXiv 2404.06395) stays, then goes down the
        line over the last `WSD_DECAY_FRACTION` of all steps that would reach 0 at `total_steps`.
    warmup_fraction : float
        Share of all steps that warm up.

    Returns
    -------
    float
        (step + 1) / w in the first w = max(1, round(total_steps * warmup_fraction)) steps, so that
        the first step moves and step w - 1 has the peak; then what the schedule says. A warm-up
        that reaches into wsd's decay is cut off by it.

    Raises
    ------
    ValueError
        If the step is not one of the run's, or the schedule unknown.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step}: allowed is 0 <= step < {total_steps}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: allowed is one of {', '.join(SCHEDULES)}")
    warmup = max(1, round(total_steps * warmup_fraction))
    factor = min(1.0, (step + 1) / warmup)
    if schedule == "wsd":
        decay = round(total_steps * WSD_DECAY_FRACTION)
        return min(factor, (total_steps - step) / (decay + 1))
    if schedule == "cosine" and step >= warmup:
        return 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total_steps + 1 - warmup)))
    return factor

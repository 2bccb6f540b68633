"""The loop anybody would write by hand: what `benchmarks.pretraining` compares a `flwr run` with.

`python -m benchmarks.plain_loop '{...}'` takes the fields of `Loop`, does the inner steps of some
workers one after the other, and prints the seconds of every round as JSON. Of this project it has
the model and the batches, so that both sides do the same arithmetic.
"""

import json
import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from isoloco_flwr.pretraining.model import build_model, context_length
from isoloco_flwr.pretraining.stream import WorkerStream
from isoloco_flwr.pretraining.tokens import load_tokens

_WARM_UP = 3
"""Inner steps before the clock starts."""


@dataclass(frozen=True)
class Loop:
    """What the loop does."""

    preset: str
    """The model."""
    tokenizer: str
    """The tokenizer of the corpus `sotu`."""
    workers: list[int]
    """Workers whose inner steps are done here."""
    num_workers: int
    """R."""
    batch_size: int
    """Sequences of one inner step of one worker."""
    micro_batch_size: int
    """Sequences at once."""
    steps: int
    """H."""
    rounds: int
    """Rounds that are timed."""
    device: str
    """cpu or cuda; the latter computes in bf16."""


def run(loop: Loop) -> list[float]:
    """Return the seconds of every round."""
    tokens = load_tokens("sotu", tokenizer=loop.tokenizer)
    model = build_model(loop.preset, vocabulary_size=tokens.vocabulary_size, seed=0)
    model.to(loop.device)  # type: ignore[arg-type]
    model.train()
    streams = [
        WorkerStream(
            tokens.train,
            context=context_length(model),
            seed=0,
            worker=worker,
            num_workers=loop.num_workers,
        )
        for worker in loop.workers
    ]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    total = max(2, loop.rounds * loop.steps)

    def step(number: int, stream: WorkerStream) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * 0.5 * (1 + math.cos(math.pi * number / total))
        batch = stream.batch(number, loop.batch_size).to(loop.device)
        optimizer.zero_grad()
        for part in torch.split(batch, loop.micro_batch_size):
            _backward(part, len(part) / len(batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def _backward(part: Tensor, share: float) -> None:
        with torch.autocast(loop.device, dtype=torch.bfloat16, enabled=loop.device == "cuda"):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        (share * loss).backward()  # type: ignore[no-untyped-call]

    def wait() -> None:
        if loop.device == "cuda":
            torch.cuda.synchronize()

    for number in range(_WARM_UP):
        step(number, streams[0])
    seconds = []
    for number in range(loop.rounds):
        wait()
        started = time.perf_counter()
        for stream in streams:
            for one in range(number * loop.steps, (number + 1) * loop.steps):
                step(one, stream)
        wait()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    print(json.dumps(run(Loop(**json.loads(sys.argv[1])))))

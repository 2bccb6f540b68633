"""The gold standard: one process that steps on every global batch, with the workers' own code.

`python -m simulations.data_parallel FOLDER` does the run that FOLDER/run.json describes, and with a
run config as second argument, written as for `flwr run`, that one: the same settings, inner loop,
schedule, evaluation and files as the Flower app has with one worker, but no outer step. A "round"
is H optimizer steps: what lies between two evaluations.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import Any, cast

import torch
from flwr.common.config import parse_config_args
from flwr.supercore import log

from isoloco_flwr.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from isoloco_flwr.pretraining.execution import prepare_model
from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model, context_length, load_tensors, model_tensors
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer
from isoloco_flwr.pretraining.stream import WorkerStream
from isoloco_flwr.pretraining.tokenizer import load_tokenizer
from isoloco_flwr.pretraining.tokens import load_tokens
from isoloco_flwr.pretraining.worker_state import load_worker_state, save_worker_state
from isoloco_flwr.records import record_from_tensors
from isoloco_flwr.settings import parse_settings
from isoloco_flwr.strategy import MergeStrategy
from server_app.results import draw_loss, open_output_folder, open_run, save_model, versions
from server_app.rounds import Rounds
from simulations.experiment import app_config

__all__ = ["train_data_parallel"]


@dataclass
class _Nothing:
    """An engine that has merged nothing."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    """See `OuterEngine`."""


@dataclass
class _OneReply:
    """What `Rounds` looks at of a strategy."""

    train_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest round."""
    engine: _Nothing = field(default_factory=_Nothing)
    """See `MergeStrategy`."""


def train_data_parallel(run_config: Mapping[str, Any]) -> None:
    """Train to the end of the budget, from the newest checkpoint on if there is one.

    Parameters
    ----------
    run_config : Mapping[str, Any]
        A whole run config. What it says of strategy, partitioner and reply does not matter.
    """
    settings = parse_settings(run_config)
    inner = settings.inner
    tokens = load_tokens(**settings.data.text())
    model = build_model(
        settings.model.preset,
        vocabulary_size=tokens.vocabulary_size,
        seed=settings.seed,
        path=settings.model.path,
        config=settings.model.config,
    )
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    prepare_model(
        model,
        compile=inner.compile,
        gradient_checkpointing=inner.gradient_checkpointing,
        tf32=inner.tf32,
    )
    context = context_length(model, settings.model.context)
    stream = WorkerStream(
        tokens.train, context=context, seed=settings.seed, worker=0, num_workers=1
    )
    folder = open_output_folder(settings.output_dir, 0, resume=settings.resume)
    decided_by = {
        "run-config": dict(run_config),
        "num-workers": 1,
        "worker-batch-size": settings.global_batch_size,
        "num-parameters": model.num_parameters(),
        "context": context,
        "model": model.config.to_dict(),
        "data": tokens.manifest,
        "versions": versions(),
    }
    open_run(folder, decided_by, allow_changed=settings.checkpoint.allow_changed_settings)
    log(INFO, "Results go to %s", folder)
    newest = _OneReply()
    rounds = Rounds(
        settings=settings,
        strategy=cast(MergeStrategy, newest),
        model=model,
        held_out=tokens.held_out,
        context=context,
        metrics_file=folder / "metrics.jsonl",
    )
    optimizer = build_inner_optimizer(
        inner.optimizer, model, lr=inner.lr, weight_decay=inner.weight_decay
    )
    checkpoints, states = folder / "checkpoints", folder / "checkpoints" / "optimizer"
    done = 0
    checkpoint = newest_checkpoint(checkpoints)
    if checkpoint:
        done = checkpoint.server_round
        load_tensors(model, checkpoint.parameters)
        if not load_worker_state(states, optimizer, round_number=done):
            raise FileNotFoundError(f"{states} has no state of round {done}")
    else:
        rounds.close(0, record_from_tensors(model_tensors(model)))
    for number in range(done + 1, settings.num_server_rounds + 1):
        torch.manual_seed(settings.seed * 1_000_003 + number)  # for models with dropout
        report = run_inner_steps(
            model,
            optimizer,
            lambda step: stream.batch(step, settings.global_batch_size),
            first_step=(number - 1) * inner.steps,
            steps=inner.steps,
            total_steps=settings.total_inner_steps,
            clip_norm=inner.clip_norm,
            schedule=inner.schedule,
            warmup_fraction=inner.warmup_fraction,
            micro_batch_size=inner.micro_batch_size,
            precision=inner.precision,
            max_skipped_steps=inner.max_skipped_steps,
        )
        trained = time.perf_counter()
        due = number % settings.checkpoint.every == 0 or number == settings.num_server_rounds
        if due:
            save_worker_state(states, optimizer, round_number=number, keep_from=done)
        newest.train_metrics = {
            "train-loss": report.mean_loss,
            "replies-used": 1,
            "num-examples": inner.steps * settings.global_batch_size,
            "inner-steps": inner.steps,
            "skipped-steps": report.skipped_steps,
            "epochs": stream.epochs(number * inner.steps, settings.global_batch_size),
            "train-seconds": report.seconds,
            "save-seconds": time.perf_counter() - trained,
        }
        tensors = model_tensors(model)
        rounds.close(number, record_from_tensors(tensors))
        if due:  # after the line of metrics, so that no resumed run lacks one
            parameters = {name: value.cpu() for name, value in tensors.items()}
            checkpoint = Checkpoint(number, parameters, momentum={}, settings={})
            save_checkpoint(checkpoints, checkpoint, keep=settings.checkpoint.keep)
            done = number
    save_model(model, load_tokenizer(tokens.tokenizer), folder / "model")
    draw_loss(rounds.rows, "data-parallel", folder / "loss.png")
    log(INFO, "Results are in %s", folder)


def main() -> None:
    """Do the run of a folder, or that of a run config into it."""
    folder = Path(sys.argv[1]).absolute()
    config = (
        parse_config_args(sys.argv[2:])
        if sys.argv[2:]
        else json.loads((folder / "run.json").read_text())["run-config"]
    )
    train_data_parallel(app_config() | config | {"output-dir": str(folder), "resume": True})


if __name__ == "__main__":
    main()

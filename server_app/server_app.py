"""The ServerApp of the pre-training app: a thin adapter around strategy and pretraining."""

import dataclasses
from logging import INFO
from typing import cast

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from isoloco_flwr.aggregation import Weighting
from isoloco_flwr.engine import Orthogonalize
from isoloco_flwr.pretraining.model import (
    build_model,
    context_length,
    load_tensors,
    model_tensors,
)
from isoloco_flwr.pretraining.tokenizer import load_tokenizer
from isoloco_flwr.pretraining.tokens import load_tokens
from isoloco_flwr.records import record_from_tensors, tensors_from_record
from isoloco_flwr.settings import parse_settings
from isoloco_flwr.strategy import MergeStrategy
from server_app.health import Health
from server_app.results import draw_loss, open_output_folder, open_run, save_model, versions
from server_app.rounds import Rounds
from server_app.sites import Sites
from server_app.worker_metrics import aggregate_worker_metrics

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Pre-train the run config's model with all connected workers and write the results."""
    # Everything that can be wrong is looked at before the first round.
    settings = parse_settings(context.run_config)
    tokens = load_tokens(**settings.data.text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(
        settings.model.preset,
        vocabulary_size=tokens.vocabulary_size,
        seed=settings.seed,
        path=settings.model.path,
        config=settings.model.config,
    )
    model.to(device)  # type: ignore[arg-type]
    context_tokens = context_length(model, settings.model.context)
    folder = open_output_folder(settings.output_dir, context.run_id, resume=settings.resume)
    health = Health(settings.metrics) if settings.metrics.port else None
    sites = Sites(grid, min_sites=settings.min_sites)
    num_workers = sites.meet()
    worker_batch_size = settings.worker_batch_size(num_workers)
    strategy = MergeStrategy(
        fraction_evaluate=0.0,
        min_train_nodes=settings.min_sites or num_workers,
        min_available_nodes=settings.min_sites or num_workers,
        min_train_replies=settings.min_sites or 1,
        train_metrics_aggr_fn=aggregate_worker_metrics,
        seed=settings.seed,
        device=device,
        orthogonalize=cast(Orthogonalize, settings.strategy.orthogonalize),
        weighting=cast(Weighting, settings.strategy.weighting),
        diagnostics=settings.strategy.diagnostics.replace(" ", "").split(","),
        **dataclasses.asdict(settings.strategy.preset),
    )
    config = {
        "run-id": context.run_id,
        "run-config": dict(context.run_config),
        "strategy": dataclasses.asdict(settings.strategy.preset),
        "num-workers": num_workers,
        "worker-batch-size": worker_batch_size,
        "num-parameters": model.num_parameters(),
        "context": context_tokens,
        "model": model.config.to_dict(),
        "data": tokens.manifest,
        "versions": versions(),
    }
    allow_changed = settings.checkpoint.allow_changed_settings
    run_key = open_run(folder, config, allow_changed=allow_changed)
    log(INFO, "Results go to %s", folder)
    rounds = Rounds(
        settings=settings,
        strategy=strategy,
        model=model,
        held_out=tokens.held_out,
        context=context_tokens,
        metrics_file=folder / "metrics.jsonl",
        health=health,
    )
    result = strategy.start(
        sites,
        record_from_tensors(model_tensors(model)),
        num_rounds=settings.num_server_rounds,
        timeout=settings.round_timeout,
        train_config=ConfigRecord({"run-key": run_key}),
        evaluate_fn=rounds.close,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=settings.checkpoint.every,
        checkpoints_kept=settings.checkpoint.keep,
        resume=settings.resume,
        allow_changed_settings=allow_changed,
    )
    load_tensors(model, tensors_from_record(result.arrays))
    save_model(model, load_tokenizer(tokens.tokenizer), folder / "model")
    title = f"{settings.strategy.name}, {num_workers} workers, H = {settings.inner.steps}"
    draw_loss(rounds.rows, title, folder / "loss.png")
    log(INFO, "Results are in %s", folder)

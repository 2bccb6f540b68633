"""The ServerApp of the pre-training app: a thin adapter around strategy and pretraining."""

import dataclasses
import time
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from isoloco_flwr.pretraining.evaluate import held_out_loss
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.tokenizer import VOCABULARY_SIZE
from isoloco_flwr.pretraining.tokens import load_tokens
from isoloco_flwr.records import record_from_tensors, tensors_from_record
from isoloco_flwr.settings import parse_settings
from isoloco_flwr.strategy import MergeStrategy
from server_app.results import (
    MetricsFile,
    draw_loss,
    open_output_folder,
    save_model,
    versions,
    write_json,
)
from server_app.workers import meet_workers

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Pre-train the run config's model with all connected workers and write the results."""
    settings = parse_settings(context.run_config)
    strategy = MergeStrategy(
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=1,
        seed=settings.seed,
        **dataclasses.asdict(settings.strategy.preset),
    )
    tokens = load_tokens(settings.data.source)
    model = build_model(settings.model.preset, vocabulary_size=VOCABULARY_SIZE, seed=settings.seed)
    folder = open_output_folder(settings.output_dir, context.run_id)
    log(INFO, "Results go to %s", folder)
    num_workers = meet_workers(grid)
    worker_batch_size = settings.worker_batch_size(num_workers)
    strategy.min_train_nodes = strategy.min_available_nodes = num_workers
    write_json(
        folder / "config.json",
        {
            "run-id": context.run_id,
            "run-config": dict(context.run_config),
            "strategy": dataclasses.asdict(settings.strategy.preset),
            "num-workers": num_workers,
            "worker-batch-size": worker_batch_size,
            "num-parameters": sum(parameter.numel() for parameter in model.parameters()),
            "model": model.config.to_dict(),
            "data": tokens.manifest,
            "versions": versions(),
        },
    )
    metrics = MetricsFile(folder / "metrics.jsonl")
    context_length = model.config.max_position_embeddings
    tokens_per_reply = settings.inner.steps * worker_batch_size * context_length
    round_started = time.perf_counter()
    num_tokens = 0

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Score the global model on held-out text and write the round's line."""
        nonlocal round_started, num_tokens
        last = server_round == settings.num_server_rounds
        every = settings.evaluation.every
        loss = None
        if server_round == 0 or last or (every and server_round % every == 0):
            model.load_state_dict(tensors_from_record(arrays))
            loss = held_out_loss(
                model,
                tokens.held_out,
                context=context_length,
                max_sequences=settings.evaluation.sequences,
            )
        train = strategy.train_metrics if server_round else MetricRecord()
        num_tokens += int(train.get("replies-used", 0)) * tokens_per_reply
        now = time.perf_counter()
        row = {
            "round": server_round,
            "eval-loss": loss,
            "train-loss": train.get("train-loss"),
            "tokens": num_tokens,
            **{key: train.get(key, 0) for key in COUNTERS},
            "seconds": now - round_started,
        }
        round_started = now
        metrics.add(row)
        log(
            INFO,
            "Round %d of %d: held-out loss %s, training loss %s, %.2f M tokens, %.1f s",
            server_round,
            settings.num_server_rounds,
            "-" if loss is None else f"{loss:.4f}",
            "-" if row["train-loss"] is None else f"{row['train-loss']:.4f}",
            num_tokens / 1e6,
            row["seconds"],
        )
        return None if loss is None else MetricRecord({"eval-loss": loss})

    result = strategy.start(
        grid,
        record_from_tensors(model.state_dict()),
        num_rounds=settings.num_server_rounds,
        train_config=ConfigRecord({"run-key": str(context.run_id)}),
        evaluate_fn=evaluate,
    )
    model.load_state_dict(tensors_from_record(result.arrays))
    save_model(model, folder / "model")
    title = f"{settings.strategy.name}, {num_workers} workers, H = {settings.inner.steps}"
    draw_loss(metrics.rows, title, folder / "loss.png")
    log(INFO, "Results are in %s", folder)

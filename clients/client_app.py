"""The ClientApp of the pre-training app: a thin adapter around pretraining."""

from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log
from torch.optim import Optimizer
from transformers import PreTrainedModel

from isoloco_flwr.pretraining.inner_loop import build_inner_optimizer, run_inner_steps
from isoloco_flwr.pretraining.model import build_model, load_tensors, model_tensors
from isoloco_flwr.pretraining.stream import sequences_per_worker, worker_batch
from isoloco_flwr.pretraining.tokenizer import VOCABULARY_SIZE
from isoloco_flwr.pretraining.tokens import Tokens, cache_folder, load_tokens
from isoloco_flwr.pretraining.worker_state import (
    WorkerStateError,
    load_worker_state,
    save_worker_state,
)
from isoloco_flwr.records import record_from_tensors, tensors_from_record
from isoloco_flwr.settings import SettingsError, parse_settings

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which worker this node is, once all it needs is there."""
    settings = parse_settings(context.run_config)
    worker, num_workers = _place(context)
    model = _model(settings.model.preset)
    sequences_per_worker(
        len(_tokens(settings.data.source).train),
        context=model.config.max_position_embeddings,
        num_workers=num_workers,
    )
    answer = ConfigRecord({"partition-id": worker, "num-partitions": num_workers})
    return Message(RecordDict({"worker": answer}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run H inner steps from the global parameters and answer with the worker's own."""
    settings = parse_settings(context.run_config)
    worker, num_workers = _place(context)
    batch_size = settings.worker_batch_size(num_workers)
    config = message.content.config_records["config"]
    server_round = cast(int, config["server-round"])
    state_folder = cache_folder() / "workers" / str(config["run-key"]) / f"worker-{worker:04d}"
    tokens = _tokens(settings.data.source)
    model = _model(settings.model.preset)
    load_tensors(model, tensors_from_record(message.content.array_records["arrays"]))
    optimizer = build_inner_optimizer(
        settings.inner.optimizer, model.parameters(), lr=settings.inner.lr
    )
    state_lost = server_round > 1 and not _restore(state_folder, optimizer, server_round - 1)
    report = run_inner_steps(
        model,
        optimizer,
        lambda step: worker_batch(
            tokens.train,
            context=model.config.max_position_embeddings,
            seed=settings.seed,
            worker=worker,
            num_workers=num_workers,
            step=step,
            batch_size=batch_size,
        ),
        first_step=(server_round - 1) * settings.inner.steps,
        steps=settings.inner.steps,
        total_steps=settings.total_inner_steps,
        lr=settings.inner.lr,
    )
    checkpointed = cast("int | None", config.get("checkpoint-round"))
    save_worker_state(
        state_folder,
        optimizer,
        round_number=server_round,
        keep_from=checkpointed,
    )
    metrics = MetricRecord(
        {
            "num-examples": settings.inner.steps * batch_size,
            "train-loss": report.mean_loss,
            "state-lost": int(state_lost),
        }
    )
    arrays = record_from_tensors(model_tensors(model))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _restore(folder: Path, optimizer: Optimizer, round_number: int) -> bool:
    """Give the optimizer the worker's state after a round; say so where it is lost."""
    try:
        if load_worker_state(folder, optimizer, round_number=round_number):
            return True
        log(WARNING, "No state of round %d in %s: the worker starts afresh", round_number, folder)
    except WorkerStateError as error:
        log(WARNING, "%s: the worker starts afresh", error)
    return False


@lru_cache(maxsize=1)
def _tokens(source: str) -> Tokens:
    """Open the memory maps once for all virtual workers of this process."""
    return load_tokens(source)


@lru_cache(maxsize=1)
def _model(preset: str) -> PreTrainedModel:
    """Build the model once for all virtual workers of this process; its weights get replaced."""
    return build_model(preset, vocabulary_size=VOCABULARY_SIZE, seed=0)


def _place(context: Context) -> tuple[int, int]:
    """Return which worker this node is, and out of how many."""
    try:
        worker = int(context.node_config["partition-id"])
        num_workers = int(context.node_config["num-partitions"])
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"node config {dict(context.node_config)}: allowed are whole numbers partition-id and "
            "num-partitions, as simulations set them"
        ) from error
    if not 0 <= worker < num_workers:
        raise SettingsError(
            f"node config partition-id = {worker}: allowed is 0 <= partition-id < {num_workers}, "
            "the node's num-partitions"
        )
    return worker, num_workers

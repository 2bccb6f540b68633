"""The ClientApp of the pre-training app: a thin adapter around pretraining."""

import dataclasses
import hashlib
import math
import platform
import shutil
import time
import uuid
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log
from numpy.typing import NDArray
from torch.optim import Optimizer
from transformers import PreTrainedModel

from clients.site import SiteSettings, parse_site
from isoloco_flwr.aggregation import PSEUDO_GRADIENT
from isoloco_flwr.pretraining.execution import prepare_model
from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import (
    build_model,
    context_length,
    load_tensors,
    model_tensors,
)
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer
from isoloco_flwr.pretraining.partition import partition_documents
from isoloco_flwr.pretraining.stream import WorkerStream
from isoloco_flwr.pretraining.tokens import Tokens, load_tokens
from isoloco_flwr.pretraining.worker_state import (
    WorkerStateError,
    age_state,
    load_worker_state,
    newest_state,
    save_worker_state,
    state_bytes,
)
from isoloco_flwr.records import (
    pseudo_gradients,
    record_from_tensors,
    records_of,
    tensors_from_record,
)
from isoloco_flwr.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    SettingsError,
    parse_settings,
)

app = ClientApp()

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which worker this node is, once all it needs is there."""
    settings = parse_settings(context.run_config)
    site = parse_site(context.node_config)
    folder = site.states()
    model = _prepared(settings, site)
    _stream(settings, site, model)
    keeps = settings.inner.state == "keep"
    # One state is read while the next is written, and all since the newest checkpoint stay.
    rounds = settings.checkpoint.every + 1
    answer = ConfigRecord(
        {
            "partition-id": site.partition_id,
            "num-partitions": site.num_partitions,
            "device": str(next(model.parameters()).device),
            "threads": torch.get_num_threads(),
            "disk": _disk_name(folder),
            "state-bytes": state_bytes(_optimizer(settings.inner, model), rounds=rounds) * keeps,
            "free-bytes": shutil.disk_usage(folder).free,
        }
    )
    return Message(RecordDict({"worker": answer}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run H inner steps from the global parameters and answer with the worker's own."""
    started = time.perf_counter()
    settings = parse_settings(context.run_config)
    inner = settings.inner
    site = parse_site(context.node_config)
    worker = site.partition_id
    batch_size = settings.worker_batch_size(site.num_partitions)
    config = records_of(message.content, ConfigRecord)["config"]
    server_round = cast(int, config["server-round"])
    model = _prepared(settings, site)
    stream = _stream(settings, site, model)
    sent = tensors_from_record(records_of(message.content, ArrayRecord)["arrays"])
    load_tensors(model, sent)
    # A model with dropout must not depend on what this process did before.
    torch.manual_seed(_random_seed(settings.seed, worker, server_round))
    optimizer = _optimizer(inner, model)
    state_folder = site.states() / _run_key(config) / f"worker-{worker:04d}"
    keeps = inner.state == "keep"
    done = _restore(state_folder, optimizer, server_round - 1, inner) if keeps else server_round - 1
    loaded = time.perf_counter()
    report = run_inner_steps(
        model,
        optimizer,
        lambda step: stream.batch(step, batch_size),
        first_step=(server_round - 1) * inner.steps,
        steps=inner.steps,
        total_steps=settings.total_inner_steps,
        clip_norm=inner.clip_norm,
        schedule=inner.schedule,
        warmup_fraction=inner.warmup_fraction,
        micro_batch_size=site.micro_batch_size(inner.micro_batch_size),
        precision=inner.precision,
        max_skipped_steps=inner.max_skipped_steps,
        max_seconds=site.max_seconds - (loaded - started) if site.max_seconds else math.inf,
    )
    trained = time.perf_counter()
    if keeps:
        save_worker_state(
            state_folder,
            optimizer,
            round_number=server_round,
            keep_from=cast("int | None", config.get("checkpoint-round")),
        )
    arrays = model_tensors(model)
    if inner.reply == "parameters":
        name, record = "arrays", record_from_tensors(arrays)
    else:
        dtype = DTYPES[inner.reply.removeprefix("pseudo-gradient-")]
        name = PSEUDO_GRADIENT
        record = record_from_tensors(pseudo_gradients(sent, arrays, dtype))
    metrics = MetricRecord(
        {
            "num-examples": report.steps * batch_size,
            "inner-steps": report.steps,
            "train-loss": report.mean_loss,
            "skipped-steps": report.skipped_steps,
            "epochs": stream.epochs(server_round * inner.steps, batch_size),
            "state-lost": int(done is None),
            "rounds-missed": 0 if done is None else server_round - 1 - done,
            "load-seconds": loaded - started,
            "train-seconds": trained - loaded,
            "save-seconds": time.perf_counter() - trained,
        }
    )
    return Message(RecordDict({name: record, "metrics": metrics}), reply_to=message)


def _restore(
    folder: Path, optimizer: Optimizer, last_round: int, inner: InnerSettings
) -> int | None:
    """Give the optimizer the worker's newest state and say of which round it is; None: lost."""
    number = newest_state(folder, up_to=last_round)
    missed = last_round - number
    try:
        if missed and inner.stale_state == "reset" and number:
            log(WARNING, "The state in %s is %d rounds old: it is reset", folder, missed)
            return number
        if number and load_worker_state(folder, optimizer, round_number=number):
            if missed:
                log(WARNING, "The state in %s is %d rounds old", folder, missed)
            if missed and inner.stale_state == "age":
                age_state(optimizer, missed * inner.steps)
            return number
    except WorkerStateError as error:
        log(WARNING, "%s: the worker starts afresh", error)
        return None
    if last_round:
        log(WARNING, "No state of round %d in %s: the worker starts afresh", last_round, folder)
        return None
    return 0


def _run_key(config: ConfigRecord) -> str:
    """Return the run's key, which must not lead out of the site's own folder."""
    key = str(config["run-key"])
    if key in ("", ".", "..") or Path(key).name != key:
        raise ValueError(f"run-key {key!r}: allowed is the name of a folder")
    return key


def _optimizer(inner: InnerSettings, model: PreTrainedModel) -> Optimizer:
    return build_inner_optimizer(
        inner.optimizer, model, lr=inner.lr, weight_decay=inner.weight_decay
    )


def _prepared(settings: RunSettings, site: SiteSettings) -> PreTrainedModel:
    """Return the model, set up for training."""
    tokens = _tokens(_own_data(settings.data, site))
    inner = settings.inner
    return _model(
        settings.model,
        tokens.vocabulary_size,
        inner.compile,
        inner.gradient_checkpointing,
        inner.tf32,
        site.torch_device(),
    )


def _stream(settings: RunSettings, site: SiteSettings, model: PreTrainedModel) -> WorkerStream:
    """Return the batches of this worker."""
    worker, num_workers = site.partition_id, site.num_partitions
    data = _own_data(settings.data, site)
    documents = None
    if data.partitioner != "iid":
        own = _partition(data, num_workers, settings.seed)[worker]
        documents = (_tokens(data).train_documents, own)
    return WorkerStream(
        _tokens(data).train,
        context=context_length(model, settings.model.context),
        seed=settings.seed,
        worker=worker,
        num_workers=num_workers,
        documents=documents,
    )


def _own_data(data: DataSettings, site: SiteSettings) -> DataSettings:
    """Return the data settings with the node's own source where each node has one."""
    if data.partitioner != "natural":
        return data
    if not site.data_source:
        raise SettingsError(
            "node config data-source = '': with data.partitioner = 'natural' every node names its "
            "own source"
        )
    return dataclasses.replace(data, source=site.data_source)


@lru_cache(maxsize=1)
def _tokens(data: DataSettings) -> Tokens:
    """Open the memory maps once for all virtual workers of this process."""
    return load_tokens(**data.text())


@lru_cache(maxsize=1)
def _partition(data: DataSettings, num_workers: int, seed: int) -> list[NDArray[np.int64]]:
    """Share the documents out once for all virtual workers of this process."""
    tokens = _tokens(data)
    return partition_documents(
        np.diff(tokens.train_documents),
        tokens.train_labels,
        tokens.label_names,
        partitioner=data.partitioner,
        num_workers=num_workers,
        alpha=data.dirichlet_alpha,
        seed=seed,
    )


@lru_cache(maxsize=1)
def _model(
    model: ModelSettings,
    vocabulary_size: int,
    compiled: bool,
    gradient_checkpointing: bool,
    tf32: bool,
    device: torch.device,
) -> PreTrainedModel:
    """Build the model once for all virtual workers of this process; its weights get replaced."""
    built = build_model(
        model.preset, vocabulary_size=vocabulary_size, seed=0, path=model.path, config=model.config
    )
    built.to(device)  # type: ignore[arg-type]
    return prepare_model(
        built,
        compile=compiled,
        gradient_checkpointing=gradient_checkpointing,
        tf32=tf32,
    )


def _random_seed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _disk_name(folder: Path) -> str:
    """Return a name of the disk that a folder lies on, which says nothing else of the machine."""
    disk = f"{platform.node()} {uuid.getnode()} {folder.stat().st_dev}"
    return hashlib.blake2b(disk.encode(), digest_size=8).hexdigest()

"""`MergeStrategy`, an outer step on merged pseudo-gradients for Flower, and its presets."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info
from flwr.supercore import log
from torch import Tensor

from isoloco_flwr.aggregation import MAX_WEIGHT, BadReplyError, Reply, Weighting, read_reply
from isoloco_flwr.checkpoint import (
    ChangedSettingsError,
    Checkpoint,
    check_same_settings,
    newest_checkpoint,
    save_checkpoint,
)
from isoloco_flwr.engine import BUFFERS, Orthogonalize, OuterEngine, SkippedRoundError
from isoloco_flwr.grid import StreamingGrid
from isoloco_flwr.presets import PRESETS
from isoloco_flwr.records import record_from_tensors, tensors_from_record

__all__ = [
    "DARE",
    "TIES",
    "TSVM",
    "DiLoCo",
    "IsoC",
    "IsoCTS",
    "IsoLoCo",
    "LocalSGD",
    "MergeStrategy",
]


_GRACE = 5.0
"""Seconds that a message outlives its round."""


@dataclass
class _Round:
    """What a round's replies are held against."""

    number: int
    reference: dict[str, Tensor]
    """Parameters sent: views of the record's bytes."""
    questions: dict[int, tuple[int, Metadata]]
    """By node id: position in the round and metadata of the message sent there. Replies are added
    up in the order of their positions."""
    workers: list[int]
    """Number of the worker at each position."""
    num_bytes: int
    """Bytes of parameters sent to all nodes together."""

    def node_at(self, position: int) -> int:
        """Return the node at a position."""
        return next(node for node, (place, _) in self.questions.items() if place == position)

    def node_asked(self, message_id: str, otherwise: int) -> int:
        """Return the node that a message was sent to."""
        for node_id, (_, question) in self.questions.items():
            if question.message_id == message_id:
                return node_id
        return otherwise


@dataclass
class _Tally:
    """What came back in a round."""

    rejected: int = 0
    """Replies left out."""
    num_bytes: dict[int, int] = field(default_factory=dict)
    """By position, bytes of parameters in the replies used."""
    contents: dict[int, RecordDict] = field(default_factory=dict)
    """By position, what the replies used carry beside their parameters."""
    answered: set[int] = field(default_factory=set)
    """Nodes that answered, well or badly."""

    def leave_out(self, node_id: int, reason: object) -> None:
        """Count a reply that is left out, and say so."""
        self.rejected += 1
        log(WARNING, "\t> Reply of node %d is left out: %s", node_id, reason)


class _Stopwatch:
    """Time spent, without the time spent waiting for the next reply."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0

    def pausing(self, replies: Iterable[Message]) -> Iterator[Message]:
        iterator = iter(replies)
        while True:
            pause = time.perf_counter()
            fetched = list(islice(iterator, 1))
            self._waited += time.perf_counter() - pause
            if not fetched:
                return
            yield fetched.pop()  # kept here it would stay while it is dealt with

    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._waited


class MergeStrategy(FedAvg):
    """Merge the workers' pseudo-gradients and take one outer optimizer step.

    A drop-in for Flower's `FedAvg`: any ClientApp that answers with full parameters under one
    ArrayRecord works unchanged. With θ the parameters sent and θ_r those a worker r came back
    with, its pseudo-gradient is Δ_r = θ - θ_r; the merge turns all Δ_r into one, parameter by
    parameter, and the outer optimizer steps θ along it (IsoLoCo, arXiv 2607.03011).

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        As in `FedAvg`, like all parameters down to `evaluate_metrics_aggr_fn`.
    fraction_evaluate : float (default: 1.0)
        As in `FedAvg`.
    min_train_nodes : int (default: 2)
        As in `FedAvg`.
    min_evaluate_nodes : int (default: 2)
        As in `FedAvg`.
    min_available_nodes : int (default: 2)
        As in `FedAvg`.
    weighted_by_key : str (default: "num-examples")
        As in `FedAvg`; weighs the parameters only with `weighting="examples"`.
    arrayrecord_key : str (default: "arrays")
        As in `FedAvg`.
    configrecord_key : str (default: "config")
        As in `FedAvg`.
    train_metrics_aggr_fn : Optional[callable] (default: None)
        As in `FedAvg`, but the records it is given hold the metrics only: parameters are freed as
        they are added up.
    evaluate_metrics_aggr_fn : Optional[callable] (default: None)
        As in `FedAvg`.
    merge : str (default: "iso_c")
        Name of a merge in `isoloco_flwr.merging.METHODS`.
    merge_options : Optional[Mapping[str, object]] (default: None)
        Options of the merge; those left out take its defaults.
    outer_lr : float (default: 1.8)
        Learning rate of the outer step, > 0.
    outer_momentum : float (default: 0.8)
        Momentum of the outer step, 0 <= momentum < 1; 0 keeps no state.
    nesterov : bool (default: True)
        Nesterov's momentum; False is heavy-ball.
    orthogonalize : {"gradient", "update"} (default: "gradient")
        Whether the merge comes before the momentum or, for merges of the mean only, after it.
    weighting : {"uniform", "examples"} (default: "uniform")
        Whether all replies weigh the same or what `weighted_by_key` says.
    average_only : Sequence[str]
        Patterns (`fnmatch`) of names that take the workers' mean value, without merge, outer
        learning rate or momentum. Default: batch-norm statistics. Integer and bool arrays are
        always treated so, and rounded back to their dtype.
    exclude : Sequence[str] (default: ())
        Patterns of names whose matrices are averaged, not merged, before the outer step.
    min_train_replies : int (default: 1)
        Good replies below which a round leaves the model and the momentum untouched.
    device : Optional[str | torch.device] (default: None)
        Where merges and outer steps are computed; None is the CPU.
    scratch_dir : Optional[str | Path] (default: None)
        Folder that exists, for replies that come before their turn and for the scratch file of
        merges that need all pseudo-gradients at once (R times the model); None takes the system's
        folder for temporary files.
    seed : int (default: 0)
        Decides which nodes are sampled and DARE's masks; nodes are numbered in the order of their
        registration.
    node_timeout : float (default: 3600.0)
        Seconds to wait for enough nodes before the run ends with a `TimeoutError`.
    diagnostics : Sequence[str] (default: ())
        Patterns of names of matrices whose merge is looked at in every round: how far the workers
        agree, and spectra before and after, in `engine.figures` (`isoloco_flwr.diagnostics`). Each
        costs one more matrix in memory and the singular values of two.

    Raises
    ------
    ValueError
        If a value is out of range, with the value and what is allowed.

    Examples
    --------
    >>> from isoloco_flwr import IsoLoCo
    >>> strategy = IsoLoCo(fraction_train=1.0, min_train_nodes=8)
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: (Callable[[list[RecordDict], str], MetricRecord] | None) = None,
        evaluate_metrics_aggr_fn: (Callable[[list[RecordDict], str], MetricRecord] | None) = None,
        *,
        merge: str = "iso_c",
        merge_options: Mapping[str, object] | None = None,
        outer_lr: float = 1.8,
        outer_momentum: float = 0.8,
        nesterov: bool = True,
        orthogonalize: Orthogonalize = "gradient",
        weighting: Weighting = "uniform",
        average_only: Sequence[str] = BUFFERS,
        exclude: Sequence[str] = (),
        min_train_replies: int = 1,
        device: str | torch.device | None = None,
        scratch_dir: str | Path | None = None,
        seed: int = 0,
        node_timeout: float = 3600.0,
        diagnostics: Sequence[str] = (),
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        self.engine = OuterEngine(
            merge=merge,
            merge_options=merge_options,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            orthogonalize=orthogonalize,
            weighting=weighting,
            average_only=average_only,
            exclude=exclude,
            min_train_replies=min_train_replies,
            device=device,
            scratch_dir=scratch_dir,
            seed=seed,
            diagnostics=diagnostics,
        )
        self.seed = seed
        self.node_timeout = node_timeout
        self.train_metrics = MetricRecord()
        """Metrics of the newest round, for an `evaluate_fn` that writes them down."""
        self._round: _Round | None = None
        self._checkpointed: int | None = None
        self._message_seconds: float | None = None
        """How long a message lives, Flower's default if None."""

    def summary(self) -> None:
        """Log summary configuration of the strategy."""
        engine = self.engine
        options = ", ".join(f"{key}={value}" for key, value in engine.merge_options.items())
        kind = "Nesterov" if engine.outer.nesterov else "heavy-ball"
        momentum = f"{kind} momentum {engine.outer.momentum}" if engine.outer.momentum else "SGD"
        log(INFO, "\t├──> %s settings:", type(self).__name__)
        log(INFO, "\t│\t├── Merge: %s%s", engine.merge.name, f" ({options})" if options else "")
        log(INFO, "\t│\t├── Outer optimizer: %s, learning rate %s", momentum, engine.outer.lr)
        log(INFO, "\t│\t├── Orthogonalize: %s", engine.orthogonalize)
        log(INFO, "\t│\t├── Weighting: %s", engine.weighting)
        log(INFO, "\t│\t├── Minimum train replies: %d", engine.min_train_replies)
        log(INFO, "\t│\t└── Device: %s", engine.device)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 1,
        checkpoints_kept: int = 2,
        resume: bool = False,
        allow_changed_settings: bool = False,
    ) -> Result:
        """Run the rounds, as Flower's `Strategy.start` does, and keep checkpoints of them.

        Replies are added up as they arrive. Parameters down to `evaluate_fn` and the result are
        those of `Strategy.start`, but `Result.arrays` holds the initial arrays, not an empty
        record, when no round aggregated.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            As in Flower; `num_rounds` counts those before a resume too.
        checkpoint_dir : Optional[str | Path] (default: None)
            Folder for the checkpoints of this run, see `isoloco_flwr.checkpoint`; None keeps none.
        checkpoint_every : int (default: 1)
            Rounds from one checkpoint to the next; the last round always has one.
        checkpoints_kept : int (default: 2)
            Newest checkpoints that stay on the disk.
        resume : bool (default: False)
            Go on from the newest good checkpoint, with its parameters, momentum and round; from
            the start if there is none. On the CPU the result has the bits of an unbroken run.
        allow_changed_settings : bool (default: False)
            Resume even if the strategy's settings are not those of the checkpoint.

        Raises
        ------
        ChangedSettingsError
            If the settings are others and that is not allowed.
        ValueError
            If a value is out of range, or `checkpoint_dir` holds checkpoints and `resume` is
            False: they belong to another run.
        """
        log(INFO, "Starting %s strategy:", type(self).__name__)
        log_strategy_start_info(num_rounds, initial_arrays, train_config, evaluate_config)
        self.summary()
        log(INFO, "")
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        for name, value in (
            ("checkpoint_every", checkpoint_every),
            ("checkpoints_kept", checkpoints_kept),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: allowed is a number >= 1")
        self._checkpointed = None if folder is None else 0
        # A node that was away must not work through the rounds it has missed. A little longer than
        # the round, so that who is missing is missing when it ends, not an error shortly before.
        self._message_seconds = timeout + _GRACE
        arrays, done = self._resume(folder, initial_arrays, resume, allow_changed_settings)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        grid = StreamingGrid(grid)
        result = Result(arrays=arrays)
        started = time.time()
        if evaluate_fn and done == 0:
            metrics = evaluate_fn(0, arrays)
            log(INFO, "Initial global evaluation results: %s", metrics)
            if metrics is not None:
                result.evaluate_metrics_serverapp[0] = metrics
        for server_round in range(done + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            messages = self.configure_train(server_round, arrays, train_config, grid)
            new_arrays, metrics = self.aggregate_train(
                server_round, grid.send_and_receive(messages, timeout=timeout)
            )
            if new_arrays is not None:
                result.arrays = arrays = new_arrays
            if metrics is not None:
                log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
                result.train_metrics_clientapp[server_round] = metrics
            messages = self.configure_evaluate(server_round, arrays, evaluate_config, grid)
            metrics = self.aggregate_evaluate(
                server_round, grid.send_and_receive(messages, timeout=timeout)
            )
            if metrics is not None:
                log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
                result.evaluate_metrics_clientapp[server_round] = metrics
            if evaluate_fn:
                log(INFO, "Global evaluation")
                metrics = evaluate_fn(server_round, arrays)
                log(INFO, "\t└──> MetricRecord: %s", metrics)
                if metrics is not None:
                    result.evaluate_metrics_serverapp[server_round] = metrics
            if folder and (server_round % checkpoint_every == 0 or server_round == num_rounds):
                # After the evaluation: what it wrote down is there when the round counts as done.
                checkpoint = Checkpoint(
                    server_round=server_round,
                    parameters=tensors_from_record(arrays),
                    momentum=self.engine.outer.state_dict(),
                    settings=self.settings(),
                )
                save_checkpoint(folder, checkpoint, keep=checkpoints_kept)
                self._checkpointed = server_round
        log(INFO, "")
        log(INFO, "Strategy execution finished in %.2fs", time.time() - started)
        log(INFO, "")
        log(INFO, "Final results:")
        log(INFO, "")
        for line in str(result).splitlines():
            log(INFO, "\t%s", line)
        log(INFO, "")
        return result

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide a run's numbers, as JSON has them."""
        return {
            **self.engine.settings(),
            "fraction-train": self.fraction_train,
            "min-train-nodes": self.min_train_nodes,
            "seed": self.seed,
        }

    def _resume(
        self, folder: Path | None, initial_arrays: ArrayRecord, resume: bool, allow_changed: bool
    ) -> tuple[ArrayRecord, int]:
        """Return where to go on from: parameters and rounds done."""
        if folder is None:
            if resume:
                raise ValueError("resume=True: checkpoint_dir must say where the checkpoints are")
            return initial_arrays, 0
        if not resume:
            if list(folder.glob("round-*")):
                raise ValueError(
                    f"checkpoint_dir={str(folder)!r} holds checkpoints of another run: allowed is "
                    "resume=True or an empty folder"
                )
            return initial_arrays, 0
        checkpoint = newest_checkpoint(folder)
        if checkpoint is None:
            log(WARNING, "No checkpoint in %s: the run starts at its beginning", folder)
            return initial_arrays, 0
        try:
            check_same_settings(checkpoint.settings, self.settings())
        except ChangedSettingsError as changed:
            if not allow_changed:
                raise
            log(WARNING, "Resuming all the same: %s", changed)
        self.engine.outer.load_state_dict(checkpoint.momentum)
        self._checkpointed = checkpoint.server_round
        return record_from_tensors(checkpoint.parameters), checkpoint.server_round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of federated training and remember what was sent."""
        self._round = None
        if self.fraction_train == 0.0:
            return []
        nodes = self._sample("train", server_round, self.fraction_train, self.min_train_nodes, grid)
        messages = self._messages(server_round, arrays, config, nodes, MessageType.TRAIN)
        self._round = _Round(
            number=server_round,
            reference=tensors_from_record(arrays),
            questions={
                message.metadata.dst_node_id: (position, message.metadata)
                for position, message in enumerate(messages)
            },
            workers=list(nodes),
            num_bytes=len(messages) * sum(len(array.data) for array in arrays.values()),
        )
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure the next round of federated evaluation."""
        if self.fraction_evaluate == 0.0:
            return []
        nodes = self._sample(
            "evaluate", server_round, self.fraction_evaluate, self.min_evaluate_nodes, grid
        )
        return self._messages(server_round, arrays, config, nodes, MessageType.EVALUATE)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the replies' pseudo-gradients and take the outer step.

        Parameters
        ----------
        server_round : int
            The round, counted from 1.
        replies : Iterable[Message]
            Replies in any order. An iterator is read one at a time; of a list, which holds them all
            anyway, more are added at once.

        Returns
        -------
        tuple[Optional[ArrayRecord], Optional[MetricRecord]]
            The new global parameters, or None when the round is skipped, and the aggregated
            metrics with `replies-used`, `replies-rejected`, `bytes-up`, `bytes-down` and
            `aggregate-seconds` added.

        Raises
        ------
        AggregationError
            If replies come for a round that `configure_train` did not prepare.
        """
        if self._round is None or self._round.number != server_round:
            if next(iter(replies), None) is None:
                return None, None
            raise AggregationError(
                f"Replies for round {server_round}, but configure_train prepared "
                f"{'none' if self._round is None else f'round {self._round.number}'}."
            )
        this_round, self._round = self._round, None
        watch = _Stopwatch()
        tally = _Tally()
        arrays = None

        def leave_out(position: int, reason: str) -> None:
            del tally.contents[position], tally.num_bytes[position]
            tally.leave_out(this_round.node_at(position), reason)

        try:
            arrays = record_from_tensors(
                self.engine.run_round(
                    server_round,
                    this_round.reference,
                    this_round.workers,
                    self._checked(this_round, watch.pausing(replies), tally),
                    leave_out,
                    in_hand=isinstance(replies, Sequence),
                )
            )
        except SkippedRoundError as reason:
            log(WARNING, "Round %d is skipped, the model stays as it is: %s", server_round, reason)
        log(
            INFO,
            "aggregate_train: Used %d replies, rejected %d, missing %d",
            len(tally.contents),
            tally.rejected,
            len(this_round.questions) - len(tally.answered),
        )
        self.train_metrics = aggregated = self._aggregate_metrics(
            [tally.contents[position] for position in sorted(tally.contents)]
        )
        aggregated["replies-used"] = len(tally.contents)
        aggregated["replies-rejected"] = tally.rejected
        aggregated["bytes-up"] = sum(tally.num_bytes.values())
        aggregated["bytes-down"] = this_round.num_bytes
        aggregated["aggregate-seconds"] = watch.seconds()
        return arrays, aggregated

    def _sample(
        self, purpose: str, server_round: int, fraction: float, minimum: int, grid: Grid
    ) -> dict[int, int]:
        """Sample nodes as `FedAvg` does, but seeded and with a limit to the wait for them.

        Nodes are numbered in the order of their registration, since their ids are random: two
        simulations with one seed sample the same workers, and add their replies up in one order.
        Returns node ids by number, in the order of the numbers.
        """
        deadline = time.monotonic() + self.node_timeout
        while True:
            nodes = sorted(grid.get_nodes(), key=lambda node: (node.registered_at, node.node_id))
            size = max(int(len(nodes) * fraction), minimum)
            needed = max(self.min_available_nodes, size)
            if len(nodes) >= needed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(nodes)} nodes are connected after {self.node_timeout:g} s, "
                    f"{needed} are needed (min_available_nodes={self.min_available_nodes}, "
                    f"min_{purpose}_nodes={minimum})"
                )
            log(
                INFO,
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                len(nodes),
                needed,
            )
            time.sleep(1)
        chooser = random.Random(f"{self.seed}/{purpose}/{server_round}")
        chosen = sorted(chooser.sample(range(len(nodes)), size))
        log(INFO, "configure_%s: Sampled %d nodes (out of %d)", purpose, size, len(nodes))
        return {index: nodes[index].node_id for index in chosen}

    def _messages(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: Mapping[int, int],
        message_type: str,
    ) -> list[Message]:
        # A record of its own: a straggler of this round must not read the next one's number.
        config = ConfigRecord({**config, "server-round": server_round})
        if self._checkpointed is not None:
            # Workers that keep state of their own keep that of this round, for a resume.
            config["checkpoint-round"] = self._checkpointed
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [
            Message(
                content=record,
                dst_node_id=node_id,
                message_type=message_type,
                ttl=self._message_seconds,
            )
            for node_id in nodes.values()
        ]

    def _checked(
        self, this_round: _Round, replies: Iterable[Message], tally: "_Tally"
    ) -> Iterator[tuple[int, Reply | None]]:
        """Check how each reply is laid out; yield its position and, if it is good, the reply."""
        for message in replies:
            node_id = message.metadata.src_node_id
            if message.has_error():  # it may come from the SuperLink, for a node that is gone
                node_id = this_round.node_asked(message.metadata.reply_to_message_id, node_id)
            position, question = this_round.questions.get(node_id, (-1, None))
            reply = None
            try:
                if (
                    question is None
                    or node_id in tally.answered
                    or message.metadata.reply_to_message_id != question.message_id
                ):
                    position = -1
                    raise BadReplyError("it answers no question of this round, or a second time")
                reply = read_reply(
                    message,
                    this_round.reference,
                    weighted_by_key=self.weighted_by_key,
                    weighting=self.engine.weighting,
                )
            except BadReplyError as reason:
                tally.leave_out(node_id, reason)
            else:
                tally.num_bytes[position] = reply.num_bytes
                tally.contents[position] = reply.metrics
            held = [reply]
            del message, reply  # or they would stay while the next ones are added or fetched
            if position >= 0:
                tally.answered.add(node_id)
                yield position, held.pop()

    def _aggregate_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the metrics of the replies whose one MetricRecord has the first one's keys."""
        usable: list[RecordDict] = []
        keys: set[str] = set()
        total_weight = 0.0
        for content in contents:
            records = list(content.metric_records.values())
            weight = records[0].get(self.weighted_by_key) if len(records) == 1 else None
            keys = keys or set(records[0] if records else ())
            usual = isinstance(weight, (int, float)) and 0 <= weight <= MAX_WEIGHT
            if usual and set(records[0]) == keys:
                usable.append(content)
                total_weight += cast(float, weight)
        if len(usable) < len(contents):
            log(
                WARNING,
                "\t> Metrics of %d replies are left out: allowed is one MetricRecord each, with "
                "the same keys and %r >= 0 among them",
                len(contents) - len(usable),
                self.weighted_by_key,
            )
        if not total_weight > 0:
            return MetricRecord()
        try:
            return self.train_metrics_aggr_fn(usable, self.weighted_by_key)
        except Exception as error:
            # The outer step is taken by now: metrics that do not fit together must not undo it.
            log(ERROR, "The round has no metrics, aggregating them raised: %r", error)
            return MetricRecord()


class LocalSGD(MergeStrategy):
    """DiLoCo-SGD: mean and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("local-sgd", keywords))


class DiLoCo(MergeStrategy):
    """Mean and Nesterov momentum (arXiv 2311.08105). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("diloco", keywords))


class IsoC(MergeStrategy):
    """Iso-C and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("iso-c", keywords))


class IsoLoCo(MergeStrategy):
    """Iso-C and Nesterov momentum (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("isoloco", keywords))


class IsoCTS(MergeStrategy):
    """Iso-CTS and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("iso-cts", keywords))


class TSVM(MergeStrategy):
    """TSV-M and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("tsv-m", keywords))


class TIES(MergeStrategy):
    """TIES and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("ties", keywords))


class DARE(MergeStrategy):
    """DARE and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **_preset("dare", keywords))


def _preset(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(PRESETS[name]), **keywords}

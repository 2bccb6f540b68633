"""One outer round without Flower's strategy classes: checked replies in, new parameters out.

Both strategy APIs of Flower stand on this.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isoloco_flwr.aggregation import (
    MeanAccumulator,
    Reply,
    Weighting,
    fault_of,
    in_order,
    is_finite,
)
from isoloco_flwr.diagnostics import MergeDiagnostics
from isoloco_flwr.merging import METHODS, check_options
from isoloco_flwr.merging.dare import worker_generator
from isoloco_flwr.outer import OuterOptimizer
from isoloco_flwr.scratch import ScratchStack, on_disk

__all__ = ["BUFFERS", "Orthogonalize", "OuterEngine", "SkippedRoundError"]

Orthogonalize = Literal["gradient", "update"]

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of batch-norm statistics, which are averaged and never stepped."""


class SkippedRoundError(ValueError):
    """A round that must leave parameters and momentum as they are; the message is the reason."""


class OuterEngine:
    """Merge and outer optimizer, with the state that lasts from round to round.

    Parameters are those of `MergeStrategy`, with the same checks.
    """

    def __init__(
        self,
        *,
        merge: str,
        merge_options: Mapping[str, object] | None,
        outer_lr: float,
        outer_momentum: float,
        nesterov: bool,
        orthogonalize: Orthogonalize,
        weighting: Weighting,
        average_only: Sequence[str],
        exclude: Sequence[str],
        min_train_replies: int,
        device: str | torch.device | None,
        scratch_dir: str | Path | None,
        seed: int,
        diagnostics: Sequence[str] = (),
    ) -> None:
        self.merge_options = check_options(merge, merge_options or {})
        self.merge = METHODS[merge]
        self.outer = OuterOptimizer(outer_lr, outer_momentum, nesterov)
        _check_choice("orthogonalize", orthogonalize, get_args(Orthogonalize))
        _check_choice("weighting", weighting, get_args(Weighting))
        if orthogonalize == "update" and self.merge.from_mean is None:
            raise ValueError(f'orthogonalize="update" with merge={merge!r}: allowed is "gradient"')
        if min_train_replies < 1:
            raise ValueError(f"min_train_replies={min_train_replies}: allowed is a number >= 1")
        if scratch_dir is not None and not Path(scratch_dir).is_dir():
            raise ValueError(f"scratch_dir={str(scratch_dir)!r}: allowed is a folder that exists")
        self.orthogonalize = orthogonalize
        self.weighting: Weighting = weighting
        self.average_only = tuple(average_only)
        self.exclude = tuple(exclude)
        self.min_train_replies = min_train_replies
        self.device = torch.device("cpu" if device is None else device)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.seed = seed
        self.diagnostics = tuple(diagnostics)
        self.figures: dict[str, dict[str, float | None]] = {}
        """Diagnostics of the newest round by name of the matrix."""

    def settings(self) -> dict[str, Any]:
        """Return what decides the numbers of an outer step, as JSON has it."""
        return {
            "merge": self.merge.name,
            "merge-options": self.merge_options,
            "outer-lr": self.outer.lr,
            "outer-momentum": self.outer.momentum,
            "nesterov": self.outer.nesterov,
            "orthogonalize": self.orthogonalize,
            "weighting": self.weighting,
            "average-only": list(self.average_only),
            "exclude": list(self.exclude),
            "min-train-replies": self.min_train_replies,
        }

    def run_round(
        self,
        server_round: int,
        reference: Mapping[str, Tensor],
        workers: Sequence[int],
        replies: Iterable[tuple[int, Reply | None]],
        leave_out: Callable[[int, str], None],
        *,
        in_hand: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Take in the replies of a round and step the parameters.

        Parameters
        ----------
        server_round : int
            The round, counted from 1.
        reference : Mapping[str, Tensor]
            Parameters sent, by name; left as they are.
        workers : Sequence[int]
            Numbers of the workers asked, by position in the round.
        replies : Iterable[tuple[int, Reply | None]]
            Position and reply in any order, None where a reply was left out; read one at a time,
            and all of them before this returns.
        leave_out : Callable[[int, str], None]
            Called with position and reason for each reply whose values are not finite. None of
            them touches the model.
        in_hand : bool (default: False)
            Whether the caller keeps all replies in memory until this returns: more of them are
            added at once then, and none waits for its turn on disk.

        Returns
        -------
        Iterator[tuple[str, Tensor]]
            New values by name, in the order, shape and dtype of `reference`, on the CPU. The
            momentum moves on while it is read, so it must be read to its end.

        Raises
        ------
        SkippedRoundError
            If fewer than `min_train_replies` replies are good, their weights add up to 0, or their
            pseudo-gradients are not finite. Nothing has changed then.
        """
        self.figures = {}
        stacked = {
            name: tensor for name, tensor in reference.items() if self._needs_all(name, tensor)
        }
        averaged = {name: tensor for name, tensor in reference.items() if name not in stacked}
        stack = ScratchStack(stacked, len(workers), self.scratch_dir) if stacked else None
        weights: dict[int, float] = {}
        watched = [
            name
            for name, sent in reference.items()
            if sent.ndim == 2 and self._is_stepped(name, sent) and _matches(name, self.diagnostics)
        ]
        seen = MergeDiagnostics()

        def drop(position: int, reason: str) -> None:
            del weights[position]
            leave_out(position, reason)

        def recorded() -> Iterator[tuple[int, Reply | None]]:
            for position, reply in replies:
                if reply is not None:
                    weights[position] = reply.weight
                    # The mean finds out by itself, when it adds a group of replies.
                    if (stacked or watched) and (reason := fault_of(reply)):
                        drop(position, reason)
                        reply = None
                if reply is not None and stack is not None:
                    stack.write(position, reply)
                    rest = {name: reply.tensors[name] for name in averaged}
                    reply = dataclasses.replace(reply, tensors=rest)
                held = [reply]
                del reply  # or it would stay while others are added
                yield position, held.pop()

        mean = MeanAccumulator(averaged, drop, in_hand=in_hand)
        set_aside = _kept if in_hand else partial(on_disk, folder=self.scratch_dir)
        try:
            for position, reply in in_order(recorded(), set_aside):
                mean.add(position, reply)
                for name in watched:
                    if name in averaged:
                        seen.add(name, reply.pseudo_gradient(name, reference[name]))
                del reply
            mean.flush()
            if len(weights) < self.min_train_replies:
                raise SkippedRoundError(
                    f"{len(weights)} good replies, needed are {self.min_train_replies}"
                )
            if not sum(weights.values()) > 0:
                raise SkippedRoundError("the weights of the replies add up to 0")
            # All merges first: should one fail, no momentum has been touched.
            means = mean.finish()
            deltas = self._before_momentum(means, reference)
            for name in watched:
                if name in means and is_finite(means[name]):
                    merges = self.orthogonalize == "gradient"
                    seen.merged(name, means[name], deltas[name] if merges else None)
            del means
            used = sorted(weights)
            for name in stacked:
                assert stack is not None
                rows = stack.read(name, used)
                if self.weighting == "examples":
                    share = torch.tensor([weights[position] for position in used], dtype=rows.dtype)
                    share = share * (len(used) / share.sum())
                    rows *= share.view(-1, *[1] * (rows.ndim - 1))
                deltas[name] = self._merge_all(
                    rows, name, server_round, [workers[position] for position in used]
                )
                if name in watched:
                    for row in rows:
                        seen.add(name, row)
                    seen.merged(name, rows.mean(0), deltas[name])
        finally:
            if stack is not None:
                stack.close()
        for name, delta in deltas.items():
            if not is_finite(delta):
                raise SkippedRoundError(f"the pseudo-gradient of {name!r} is not finite")
        self.figures = seen.figures()
        return (
            (name, self._new_values(name, sent, deltas.pop(name)))
            for name, sent in reference.items()
        )

    def _merge_all(
        self, rows: Tensor, name: str, server_round: int, workers: Sequence[int]
    ) -> Tensor:
        options = dict(self.merge_options)
        if self.merge.name == "dare":
            options["generator"] = [
                worker_generator(self.seed, server_round, worker, name) for worker in workers
            ]
        try:
            return self.merge.function(rows.to(self.device), **options)
        except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise SkippedRoundError(f"{name!r}: {error}") from error

    def _needs_all(self, name: str, sent: Tensor) -> bool:
        return (
            self.merge.from_mean is None
            and self._is_stepped(name, sent)
            and self._is_merged(name, sent)
        )

    def _is_stepped(self, name: str, sent: Tensor) -> bool:
        return sent.is_floating_point() and not _matches(name, self.average_only)

    def _is_merged(self, name: str, sent: Tensor) -> bool:
        if sent.ndim != 2:
            return not self.merge.matrices_only
        return not _matches(name, self.exclude)

    def _before_momentum(
        self, means: Mapping[str, Tensor], reference: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what the outer optimizer takes as gradients, by name."""
        stepped = [name for name in means if self._is_stepped(name, reference[name])]
        deltas = {**means, **{name: means[name].to(self.device) for name in stepped}}
        if self.orthogonalize == "gradient":
            for name, merged in self._merged_means({name: deltas[name] for name in stepped}):
                deltas[name] = merged
        return deltas

    def _merged_means(self, means: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield merged means by name: on a CPU, with as many at a time as it has threads.

        LAPACK gains little from several threads for one matrix, and loses by them for a small one.
        """
        threads = torch.get_num_threads()
        # The largest first, so that none of them is left for the end.
        names = sorted(means, key=lambda name: means[name].numel(), reverse=True)
        matrices = sum(self._is_merged(name, means[name]) for name in names)
        if self.device.type != "cpu" or matrices < 2 * threads or threads == 1:
            for name in names:
                yield name, self._merge_mean(name, means[name])
            return
        try:
            with ThreadPoolExecutor(
                threads, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                yield from zip(
                    names,
                    pool.map(self._merge_mean, names, map(means.__getitem__, names)),
                    strict=True,
                )
        finally:
            torch.set_num_threads(threads)  # MKL's number is the whole process's

    def _merge_mean(self, name: str, mean: Tensor) -> Tensor:
        if self.merge.from_mean is None or not self._is_merged(name, mean) or not is_finite(mean):
            return mean
        try:
            return self.merge.from_mean(mean, **self.merge_options)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise SkippedRoundError(f"{name!r}: {error}") from error

    def _new_values(self, name: str, sent: Tensor, delta: Tensor) -> Tensor:
        if not sent.is_floating_point():
            return (delta >= 0.5 if sent.dtype == torch.bool else delta.round()).to(sent.dtype)
        if not self._is_stepped(name, sent):
            return (sent.to(delta.dtype) - delta).to(sent.dtype)
        if self.orthogonalize == "gradient":
            values = self.outer.step(sent, delta, name)
        else:
            values = self.outer.step_transformed(
                sent, delta, name, lambda direction: self._merge_mean(name, direction)
            )
        return values.to("cpu", sent.dtype)


def _kept(reply: Reply) -> Reply:
    return reply


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: allowed is one of {', '.join(choices)}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

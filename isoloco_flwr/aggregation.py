"""Replies in, one pseudo-gradient out.

Every reply is checked alone, so that a bad one leaves no trace. The good ones are folded into one
accumulator in a fixed order, whatever order they arrive in, so that the sum has the same bits each
time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from isoloco_flwr.fold import fastest_fold, flat_array
from isoloco_flwr.records import named_like, records_of, tensors_from_record

__all__ = ["BadReplyError", "MeanAccumulator", "Reply", "fault_of", "in_order", "read_reply"]

Weighting = Literal["uniform", "examples"]

MAX_WEIGHT = 2.0**63
"""Largest weight of a reply: a count of examples has no more, and sums stay far from overflow."""

_PENDING_BYTES = 64 << 20
"""Replies that are together this large are folded at once: sum and reference travel through memory
once for all of them."""

_PENDING_BYTES_IN_HAND = 640 << 20
"""The same where replies stay in memory anyway."""

_WAITING_BYTES = 16 << 20
"""Replies that wait for their turn in memory; those beyond wait elsewhere."""

PSEUDO_GRADIENT = "pseudo-gradient"
"""Name of the ArrayRecord of a reply that carries what was sent minus what the worker ended at."""


class BadReplyError(ValueError):
    """A reply that must not touch the model; the message is the reason."""


@dataclass(frozen=True)
class Reply:
    """A reply that is laid out as the parameters sent; its values may not be finite yet."""

    tensors: Mapping[str, Tensor]
    """The worker's parameters by name, or its pseudo-gradient: views of the bytes received."""
    weight: float
    """Weight of the reply in the mean, >= 0."""
    metrics: RecordDict
    """What came beside the parameters."""
    num_bytes: int
    """Bytes of the parameters received."""
    is_pseudo_gradient: bool = False
    """Whether floating-point tensors are pseudo-gradients, of any float dtype."""

    def tensor_bytes(self) -> int:
        """Return the bytes of the tensors that are still here."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pseudo_gradient(self, name: str, sent: Tensor) -> Tensor:
        """Return the pseudo-gradient of a floating-point parameter, in the accumulation dtype."""
        dtype = accumulation_dtype(sent)
        values = self.tensors[name].to(dtype)
        return values if self.is_pseudo_gradient else sent.to(dtype) - values


def read_reply(
    message: Message,
    reference: Mapping[str, Tensor],
    *,
    weighted_by_key: str,
    weighting: Weighting,
) -> Reply:
    """Check a reply against the parameters that were sent, but for its values (`fault_of`).

    Parameters
    ----------
    message : Message
        A worker's answer: full parameters under one ArrayRecord of any name, or its
        pseudo-gradient under one of the name "pseudo-gradient"; metrics under one MetricRecord.
    reference : Mapping[str, Tensor]
        The parameters that were sent, by name.
    weighted_by_key : str
        Key of the metric that weighs the reply when `weighting` is "examples".
    weighting : {"uniform", "examples"}
        Whether every reply weighs 1 or what it reports.

    Raises
    ------
    BadReplyError
        If the reply carries an error, a missing, extra, mis-shaped or wrongly typed tensor,
        unreadable bytes, more or less than one ArrayRecord, or a bad weight.
    """
    if message.has_error():
        raise BadReplyError(f"error reply: {message.error.reason}")
    arrays = records_of(message.content, ArrayRecord)
    metrics = records_of(message.content, MetricRecord)
    if len(arrays) != 1:
        raise BadReplyError(f"{len(arrays)} ArrayRecords, allowed is 1")
    [(name, record)] = arrays.items()
    try:
        tensors = named_like(tensors_from_record(record), reference)
    except ValueError as error:
        raise BadReplyError(str(error)) from error
    is_pseudo_gradient = name == PSEUDO_GRADIENT
    check_tensors(tensors, reference, any_float=is_pseudo_gradient)
    weight = 1.0
    if weighting == "examples":
        if len(metrics) != 1:
            raise BadReplyError(f"{len(metrics)} MetricRecords, allowed is 1")
        [metric] = metrics.values()
        weight = check_weight(weighted_by_key, metric.get(weighted_by_key))
    num_bytes = sum(len(array.data) for array in record.values())
    return Reply(
        tensors=tensors,
        weight=weight,
        metrics=RecordDict(dict(metrics)),
        num_bytes=num_bytes,
        is_pseudo_gradient=is_pseudo_gradient,
    )


def check_tensors(
    tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, any_float: bool = False
) -> None:
    """Raise `BadReplyError` unless tensors are laid out as those sent.

    With `any_float` a floating-point tensor may have another floating-point dtype.
    """
    if missing := [name for name in reference if name not in tensors]:
        raise BadReplyError(f"array {missing[0]!r} is missing ({len(missing)} missing)")
    if extra := [name for name in tensors if name not in reference]:
        raise BadReplyError(f"array {extra[0]!r} was not in the model sent ({len(extra)} extra)")
    for name, sent in reference.items():
        got = tensors[name]
        if got.shape != sent.shape:
            raise BadReplyError(
                f"array {name!r} of shape {tuple(got.shape)}, sent was {tuple(sent.shape)}"
            )
        if got.dtype != sent.dtype:
            both_float = got.is_floating_point() and sent.is_floating_point()
            if not (any_float and both_float):
                raise BadReplyError(f"array {name!r} of {got.dtype}, sent was {sent.dtype}")


def fault_of(reply: Reply) -> str | None:
    """Return what is wrong with the values of a reply: which are not finite, None if all are."""
    for name, tensor in reply.tensors.items():
        if not is_finite(tensor):
            return f"array {name!r} has values that are not finite"
    return None


def check_weight(key: str, weight: object) -> float:
    """Return the weight of a reply, or raise `BadReplyError` unless it is 0 to `MAX_WEIGHT`."""
    if not isinstance(weight, (int, float)) or not 0 <= weight <= MAX_WEIGHT:
        raise BadReplyError(f"{key!r} is {weight!r:.40}, allowed is a number from 0 to 2**63")
    return float(weight)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether every value of a tensor is finite, in one cheap pass where it is so."""
    if not tensor.is_floating_point():
        return True
    # The sum of finite values is finite but for an overflow, which only the slow pass can tell.
    if tensor.dtype == torch.float32 and tensor.is_cpu:
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(flat_array(tensor)))
    else:
        total = tensor.sum(dtype=accumulation_dtype(tensor)).item()
    return math.isfinite(total) or bool(torch.isfinite(tensor).all())


def in_order(
    replies: Iterable[tuple[int, Reply | None]], set_aside: Callable[[Reply], Reply]
) -> Iterator[tuple[int, Reply]]:
    """Yield positions and replies by position, holding back those that arrive before their turn.

    Parameters
    ----------
    replies : Iterable[tuple[int, Reply | None]]
        Position in the round, counted from 0, and reply; None where a position brings none. A
        position may be missing: those behind it are held until the end.
    set_aside : Callable[[Reply], Reply]
        Returns the reply with its tensors out of memory. Called when those that wait there would
        become more than 16 MB.
    """
    waiting: dict[int, Reply] = {}
    in_memory: dict[int, int] = {}  # bytes by position
    left_out: set[int] = set()
    turn = 0
    for position, reply in replies:
        if reply is None:
            left_out.add(position)
        else:
            if position > turn:
                size = reply.tensor_bytes()
                if size + sum(in_memory.values()) > _WAITING_BYTES:
                    reply = set_aside(reply)
                else:
                    in_memory[position] = size
            waiting[position] = reply
        del reply  # or it would stay while the next one is fetched
        while turn in waiting or turn in left_out:
            if turn in waiting:
                in_memory.pop(turn, None)
                yield turn, waiting.pop(turn)
            turn += 1
    for position in sorted(waiting):
        yield position, waiting.pop(position)


class MeanAccumulator:
    """Running weighted mean of pseudo-gradients: memory for two models, however many replies.

    Replies are added in groups. The new sums are written beside the old ones, and only if they
    are finite do they take their place: so a value that is not finite is found while the replies
    are added, without reading them twice, and what it came in leaves no trace.

    Parameters
    ----------
    reference : Mapping[str, Tensor]
        The parameters that were sent, by name. Floating-point ones are summed as differences to
        these, in float32 (float64 for float64): a difference of near values is exact, so that the
        rounding errors are relative to the small pseudo-gradient and not to the large parameter.
        Integer and bool ones are summed as they are, in float64.
    leave_out : Callable[[int, str], None]
        Called with position and reason for a reply that is not finite, which is not added.
    in_hand : bool (default: False)
        Whether replies stay in memory whatever is done here: their groups are larger then, with
        the same bits in the end.
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        leave_out: Callable[[int, str], None],
        *,
        in_hand: bool = False,
    ) -> None:
        self._reference = reference
        self._leave_out = leave_out
        self._fold_tensors = fastest_fold()
        self._names: dict[bool, list[str]] = {True: [], False: []}  # by whether floating-point
        for name, tensor in reference.items():
            self._names[tensor.is_floating_point()].append(name)
        self._sums = {
            name: torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor))
            for name, tensor in reference.items()
        }
        self._new_sums = {name: torch.empty_like(sums) for name, sums in self._sums.items()}
        self._pending: list[tuple[int, Reply]] = []
        self._pending_bytes = 0
        self._most_pending_bytes = _PENDING_BYTES_IN_HAND if in_hand else _PENDING_BYTES
        self.total_weight = 0.0

    def add(self, position: int, reply: Reply) -> None:
        """Add a reply that has the reference's tensors; same replies in same order, same bits.

        Which of them are not finite is known when `flush` has been called.
        """
        self._pending.append((position, reply))
        self._pending_bytes += reply.tensor_bytes()
        if self._pending_bytes >= self._most_pending_bytes:
            self.flush()

    def flush(self) -> None:
        """Add the replies that wait for their group to fill."""
        if not self._pending:
            return
        if not self._fold():
            # Rare: every reply of the group is looked at alone.
            faults = {position: fault_of(reply) for position, reply in self._pending}
            self._pending = [one for one in self._pending if faults[one[0]] is None]
            for position, fault in faults.items():
                if fault is not None:
                    self._leave_out(position, fault)
            self._fold()  # sums that overflow stay, for the round to be skipped
        if self._pending:
            self.total_weight += sum(reply.weight for _, reply in self._pending)
            self._sums, self._new_sums = self._new_sums, self._sums
        self._pending.clear()
        self._pending_bytes = 0

    def finish(self) -> dict[str, Tensor]:
        """Return the means by name and give up the accumulator's memory to them.

        Returns
        -------
        dict[str, Tensor]
            Mean pseudo-gradient of the floating-point parameters, mean value of the others, in
            the accumulation dtype.

        Raises
        ------
        ValueError
            If the weights add up to zero.
        """
        self.flush()
        if not self.total_weight > 0:
            raise ValueError("the weights of the replies add up to 0")
        self._new_sums.clear()
        return {name: self._sums.pop(name).div_(self.total_weight) for name in self._reference}

    def _fold(self) -> bool:
        """Write the sums with what is pending beside the old ones; tell whether they are finite."""
        is_finite = True
        old = self._sums
        for is_pseudo_gradient, group in groupby(
            (reply for _, reply in self._pending), lambda reply: reply.is_pseudo_gradient
        ):
            replies = list(group)
            weights = [reply.weight for reply in replies]
            for as_difference, names in self._names.items():
                subtract = as_difference and not is_pseudo_gradient
                is_finite &= self._fold_tensors(
                    [self._new_sums[name] for name in names],
                    [old[name] for name in names],
                    [self._reference[name] for name in names] if subtract else None,
                    [[reply.tensors[name] for name in names] for reply in replies],
                    # What is added as it is is 0 minus itself, by minus its weight.
                    weights if subtract else [-weight for weight in weights],
                )
            old = self._new_sums
        return is_finite


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which values of a tensor's dtype are summed."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.float32
    return torch.float64

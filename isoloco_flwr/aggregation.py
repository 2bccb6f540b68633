"""Replies in, one pseudo-gradient out.

Every reply is checked alone and before anything is added, so that a bad one leaves no trace. The
good ones are folded into one accumulator in a fixed order, whatever order they arrive in, so that
the sum has the same bits each time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from isoloco_flwr.records import named_like, tensors_from_record

__all__ = ["BadReplyError", "MeanAccumulator", "Reply", "in_order", "read_reply"]

Weighting = Literal["uniform", "examples"]

MAX_WEIGHT = 2.0**63
"""Largest weight of a reply: a count of examples has no more, and sums stay far from overflow."""

_CHUNK = 1 << 18
"""Elements folded at a time: a chunk of the sum stays in the processor's cache."""


class BadReplyError(ValueError):
    """A reply that must not touch the model; the message is the reason."""


@dataclass(frozen=True)
class Reply:
    """A checked reply."""

    tensors: Mapping[str, Tensor]
    """The worker's parameters by name: views of the bytes received."""
    weight: float
    """Weight of the reply in the mean, >= 0."""
    metrics: RecordDict
    """What came beside the parameters."""
    num_bytes: int
    """Bytes of the parameters received."""


def read_reply(
    message: Message,
    reference: Mapping[str, Tensor],
    *,
    weighted_by_key: str,
    weighting: Weighting,
) -> Reply:
    """Check a reply against the parameters that were sent.

    Parameters
    ----------
    message : Message
        A worker's answer: full parameters under one ArrayRecord, metrics under one MetricRecord.
    reference : Mapping[str, Tensor]
        The parameters that were sent, by name.
    weighted_by_key : str
        Key of the metric that weighs the reply when `weighting` is "examples".
    weighting : {"uniform", "examples"}
        Whether every reply weighs 1 or what it reports.

    Raises
    ------
    BadReplyError
        If the reply carries an error, a non-finite value, a missing, extra, mis-shaped or wrongly
        typed tensor, unreadable bytes, more or less than one ArrayRecord, or a bad weight.
    """
    if message.has_error():
        raise BadReplyError(f"error reply: {message.error.reason}")
    content = message.content
    if len(content.array_records) != 1:
        raise BadReplyError(f"{len(content.array_records)} ArrayRecords, allowed is 1")
    record = next(iter(content.array_records.values()))
    try:
        tensors = named_like(tensors_from_record(record), reference)
    except ValueError as error:
        raise BadReplyError(str(error)) from error
    check_tensors(tensors, reference)
    weight = 1.0
    if weighting == "examples":
        if len(content.metric_records) != 1:
            raise BadReplyError(f"{len(content.metric_records)} MetricRecords, allowed is 1")
        metric = next(iter(content.metric_records.values())).get(weighted_by_key)
        weight = check_weight(weighted_by_key, metric)
    metrics = RecordDict(dict(content.metric_records.items()))
    num_bytes = sum(len(array.data) for array in record.values())
    return Reply(tensors=tensors, weight=weight, metrics=metrics, num_bytes=num_bytes)


def check_tensors(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Raise `BadReplyError` unless tensors are finite and laid out as those sent."""
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
            raise BadReplyError(f"array {name!r} of {got.dtype}, sent was {sent.dtype}")
        if not is_finite(got):
            raise BadReplyError(f"array {name!r} has values that are not finite")


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
    total = tensor.sum(dtype=accumulation_dtype(tensor))
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def in_order(replies: Iterable[tuple[int, Reply | None]]) -> Iterator[Reply]:
    """Yield replies by their position, holding back those that arrive before their turn.

    Parameters
    ----------
    replies : Iterable[tuple[int, Reply | None]]
        Position in the round, counted from 0, and reply; None where a position brings none. A
        position may be missing: those behind it are held until the end.
    """
    waiting: dict[int, Reply] = {}
    left_out: set[int] = set()
    turn = 0
    for position, reply in replies:
        if reply is None:
            left_out.add(position)
        else:
            waiting[position] = reply
        del reply  # or it would stay while the next one is fetched
        while turn in waiting or turn in left_out:
            if turn in waiting:
                yield waiting.pop(turn)
            turn += 1
    for position in sorted(waiting):
        yield waiting.pop(position)


class MeanAccumulator:
    """Running weighted mean of pseudo-gradients: memory for one model, however many replies.

    Parameters
    ----------
    reference : Mapping[str, Tensor]
        The parameters that were sent, by name. Floating-point ones are summed as differences to
        these, in float32 (float64 for float64): a difference of near values is exact, so that the
        rounding errors are relative to the small pseudo-gradient and not to the large parameter.
        Integer and bool ones are summed as they are, in float64.
    """

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        self._reference = reference
        self._sums = {
            name: torch.zeros(tensor.numel(), dtype=accumulation_dtype(tensor))
            for name, tensor in reference.items()
        }
        self._pending: list[Reply] = []
        self.total_weight = 0.0

    def add(self, reply: Reply) -> None:
        """Add a checked reply; the same replies in the same order give the same bits."""
        self.total_weight += reply.weight
        self._pending.append(reply)
        # Two at a time: the sum and the reference travel through memory half as often.
        if len(self._pending) == 2:
            self._fold()

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
        if not self.total_weight > 0:
            raise ValueError("the weights of the replies add up to 0")
        self._fold()
        return {
            name: self._sums.pop(name).div_(self.total_weight).view(tensor.shape)
            for name, tensor in self._reference.items()
        }

    def _fold(self) -> None:
        buffer = torch.empty(_CHUNK, dtype=torch.float32)
        for name, total in self._sums.items():
            sent = self._reference[name].reshape(-1)
            parts = [(reply.tensors[name].reshape(-1), reply.weight) for reply in self._pending]
            for start in range(0, total.numel(), _CHUNK):
                chunk = slice(start, start + _CHUNK)
                sum_chunk, sent_chunk = total[chunk], sent[chunk]
                for values, weight in parts:
                    if sent.dtype == torch.float32:
                        difference = buffer[: sum_chunk.numel()]
                        torch.sub(sent_chunk, values[chunk], out=difference)
                    elif sent.is_floating_point():
                        difference = sent_chunk.to(total.dtype) - values[chunk].to(total.dtype)
                    else:
                        difference = values[chunk].to(total.dtype)
                    sum_chunk.add_(difference, alpha=weight)
        self._pending.clear()


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which values of a tensor's dtype are summed."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.float32
    return torch.float64

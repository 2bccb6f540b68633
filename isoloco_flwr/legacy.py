"""The strategies for Flower's older API: `ServerAppComponents(strategy=...)` and NumPyClients.

The same presets and the same arithmetic as `isoloco_flwr.strategy`, over `aggregate_fit`. This API
hands over all results of a round at once, so that its memory grows with the number of clients.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.supercore import log
from torch import Tensor

from isoloco_flwr.aggregation import (
    BadReplyError,
    Reply,
    Weighting,
    check_tensors,
    check_weight,
)
from isoloco_flwr.engine import BUFFERS, Orthogonalize, OuterEngine, SkippedRoundError
from isoloco_flwr.merging import METHODS
from isoloco_flwr.presets import PRESETS
from isoloco_flwr.records import npy_from_tensor, tensor_from_npy

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

_TENSOR_TYPE = "numpy.ndarray"


class MergeStrategy(FedAvg):
    """`isoloco_flwr.MergeStrategy` for `flwr.server.strategy.Strategy`.

    Parameters
    ----------
    **fedavg : Any
        Everything that `flwr.server.strategy.FedAvg` takes, with its defaults.
    merge, merge_options, outer_lr, outer_momentum, nesterov, orthogonalize, weighting, \
average_only, exclude, min_train_replies, device, scratch_dir, seed
        As in `isoloco_flwr.MergeStrategy`. Parameters have no names in this API: patterns match
        their place in the list, "0", "1", ...; `weighting="examples"` weighs by `num_examples`.

    Raises
    ------
    ValueError
        If a value is out of range, with the value and what is allowed.
    """

    def __init__(
        self,
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
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
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
        )
        self._sent: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        """Name the strategy and its merge."""
        return f"{type(self).__name__}(merge={self.engine.merge.name!r})"

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Configure the next round of training and remember what was sent."""
        self._sent = _read(parameters)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Merge the results' pseudo-gradients and take the outer step.

        Returns None for the parameters when the round is skipped. The metrics are those of
        `fit_metrics_aggregation_fn` with `replies-used` and `replies-rejected` added.
        """
        if self._sent is None:
            raise RuntimeError("aggregate_fit was called before configure_fit")
        if failures and not self.accept_failures:
            return None, {}
        self._refuse_a_sum(results)
        in_turn = sorted(results, key=lambda pair: pair[0].cid)
        used = {position: result for position, (_, result) in enumerate(in_turn)}

        def leave_out(position: int, reason: object) -> None:
            del used[position]
            cid = in_turn[position][0].cid
            log(WARNING, "\t> Result of client %s is left out: %s", cid, reason)

        replies: list[tuple[int, Reply | None]] = []
        for position, (_, result) in enumerate(in_turn):
            try:
                replies.append((position, self._check(result)))
            except BadReplyError as reason:
                leave_out(position, reason)
                replies.append((position, None))
        parameters = None
        try:
            values = self.engine.run_round(
                server_round, self._sent, range(len(replies)), replies, leave_out, in_hand=True
            )
            parameters = Parameters(
                tensors=[npy_from_tensor(value) for _, value in values], tensor_type=_TENSOR_TYPE
            )
        except SkippedRoundError as reason:
            log(WARNING, "Round %d is skipped, the model stays as it is: %s", server_round, reason)
        metrics: dict[str, Scalar] = {}
        if self.fit_metrics_aggregation_fn and used:
            metrics = self.fit_metrics_aggregation_fn(
                [(result.num_examples, result.metrics) for result in used.values()]
            )
        metrics["replies-used"] = len(used)
        metrics["replies-rejected"] = len(results) - len(used) + len(failures)
        return parameters, metrics

    def _refuse_a_sum(self, results: list[tuple[ClientProxy, FitRes]]) -> None:
        """Raise if a merge that needs each client's own result gets what Flower's SecAgg leaves.

        Its workflows put one object, the weighted mean, into all results.
        """
        summed = len(results) > 1 and len({id(result.parameters) for _, result in results}) == 1
        if summed and self.engine.merge.from_mean is None:
            raise ValueError(
                f"merge={self.engine.merge.name!r} needs each client's own result, and secure "
                "aggregation gives their mean: allowed is "
                + ", ".join(name for name, method in METHODS.items() if method.from_mean)
            )

    def _check(self, result: FitRes) -> Reply:
        assert self._sent is not None
        try:
            tensors = _read(result.parameters)
        except ValueError as error:
            raise BadReplyError(str(error)) from error
        check_tensors(tensors, self._sent)
        weight = 1.0
        if self.engine.weighting == "examples":
            weight = check_weight("num_examples", result.num_examples)
        num_bytes = sum(len(data) for data in result.parameters.tensors)
        return Reply(tensors=tensors, weight=weight, metrics=RecordDict(), num_bytes=num_bytes)


class LocalSGD(MergeStrategy):
    """DiLoCo-SGD: mean and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("local-sgd", keywords))


class DiLoCo(MergeStrategy):
    """Mean and Nesterov momentum (arXiv 2311.08105). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("diloco", keywords))


class IsoC(MergeStrategy):
    """Iso-C and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("iso-c", keywords))


class IsoLoCo(MergeStrategy):
    """Iso-C and Nesterov momentum (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("isoloco", keywords))


class IsoCTS(MergeStrategy):
    """Iso-CTS and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("iso-cts", keywords))


class TSVM(MergeStrategy):
    """TSV-M and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("tsv-m", keywords))


class TIES(MergeStrategy):
    """TIES and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("ties", keywords))


class DARE(MergeStrategy):
    """DARE and plain SGD (arXiv 2607.03011). Parameters: `MergeStrategy`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**_preset("dare", keywords))


def _preset(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(PRESETS[name]), **keywords}


def _read(parameters: Parameters) -> dict[str, Tensor]:
    if parameters.tensor_type != _TENSOR_TYPE:
        raise ValueError(f"tensor type {parameters.tensor_type!r}, allowed is {_TENSOR_TYPE!r}")
    return {str(place): tensor_from_npy(data) for place, data in enumerate(parameters.tensors)}

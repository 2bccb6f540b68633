"""The run's numbers for Prometheus, over HTTP."""

from collections.abc import Mapping
from typing import Any

from isoloco_flwr.fields import SettingsError
from isoloco_flwr.settings import MetricsSettings

__all__ = ["Health"]

_TOTALS = {
    "replies-used": "Replies that were merged",
    "replies-rejected": "Replies that were left out",
    "bytes-up": "Bytes of parameters in the replies used",
    "bytes-down": "Bytes of parameters sent",
    "tokens": "Tokens trained on",
}

_LATEST = {
    "round": "Newest round that is done",
    "seconds": "Seconds that the newest round took",
    "train-loss": "Training loss of the newest round, nats a token",
    "eval-loss": "Newest held-out loss, nats a token",
}


class Health:
    """Answer GET with the numbers of the newest round and the totals since the ServerApp started.

    Parameters
    ----------
    settings : MetricsSettings
        Where to listen.

    Raises
    ------
    SettingsError
        If prometheus_client is not installed, or the port is taken.
    """

    def __init__(self, settings: MetricsSettings) -> None:
        key = f"run-config key metrics.port = {settings.port}"
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ImportError as error:
            raise SettingsError(
                f"{key} needs prometheus-client, the extra `metrics`: allowed without it is 0"
            ) from error
        registry = CollectorRegistry()
        self._totals = {
            key: Counter(_name(key), text, registry=registry) for key, text in _TOTALS.items()
        }
        self._latest = {
            key: Gauge(_name(key), text, registry=registry) for key, text in _LATEST.items()
        }
        self._tokens_before: int | None = None
        try:
            start_http_server(settings.port, settings.host, registry)
        except OSError as error:
            raise SettingsError(
                f"{key} on metrics.host = {settings.host!r}: allowed is a free port ({error})"
            ) from error

    def update(self, row: Mapping[str, Any]) -> None:
        """Take in a line of `metrics.jsonl`."""
        for key, gauge in self._latest.items():
            if row[key] is not None:
                gauge.set(row[key])
        for key, counter in self._totals.items():
            if key != "tokens":
                counter.inc(row[key])
        if self._tokens_before is not None:
            self._totals["tokens"].inc(row["tokens"] - self._tokens_before)
        self._tokens_before = row["tokens"]


def _name(key: str) -> str:
    return f"isoloco_{key.replace('-', '_')}"

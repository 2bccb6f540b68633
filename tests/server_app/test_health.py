"""The Prometheus page: where it listens, and what it cannot start with."""

import socket
import sys
import urllib.request

import pytest
from federation import free_port

from isoloco_flwr.fields import SettingsError
from isoloco_flwr.settings import MetricsSettings
from server_app.health import Health

ROW = {
    "round": 3,
    "seconds": 2.5,
    "train-loss": 4.0,
    "eval-loss": None,
    "tokens": 100,
    "replies-used": 2,
    "replies-rejected": 1,
    "bytes-up": 10,
    "bytes-down": 20,
}


def numbers(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}


def test_totals_add_up_and_the_last_held_out_loss_stays():
    port = free_port()
    health = Health(MetricsSettings(port=port, host="127.0.0.1"))
    health.update({**ROW, "eval-loss": 5.0})
    health.update({**ROW, "round": 4, "tokens": 150})
    page = numbers(port)
    assert page["isoloco_round"] == 4
    assert page["isoloco_eval_loss"] == 5.0
    assert page["isoloco_replies_used_total"] == 4
    assert page["isoloco_replies_rejected_total"] == 2
    assert page["isoloco_tokens_total"] == 50


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"metrics.port = {port} on .*free port"):
            Health(MetricsSettings(port=port, host="127.0.0.1"))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"metrics.port = 9100 needs prometheus-client"):
        Health(MetricsSettings(port=9100, host="127.0.0.1"))

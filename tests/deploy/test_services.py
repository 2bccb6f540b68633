"""The Compose file and the systemd units: well-formed, and they start what there is."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from deploy.command import app

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = ["isoloco-server.service", "isoloco-site.service"]
KEYS = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        *("User", "WorkingDirectory", "EnvironmentFile", "ExecStart", "StateDirectory"),
        *("StateDirectoryMode", "Restart", "RestartSec", "UMask", "NoNewPrivileges"),
        *("PrivateTmp", "ProtectHome", "ProtectSystem"),
    },
    "Install": {"WantedBy"},
}


def read_unit(name: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / name)
    return unit


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def assert_is_a_command(arguments: list[str]) -> None:
    """Let the command line be parsed, with variables filled in, and run nothing."""
    values = {"SITE": "0", "SITES": "2"}
    filled = [
        re.sub(r"\$\{(\w+)(?::-[^}]*)?\}", lambda match: values.get(match[1], "x"), argument)
        for argument in arguments
    ]
    command = typer.main.get_command(app).commands[filled[0]]
    command.make_context(filled[0], filled[1:])


@pytest.mark.parametrize("name", UNITS)
def test_units_have_keys_that_systemd_knows(name):
    unit = read_unit(name)
    assert set(unit.sections()) == set(KEYS)
    for section in unit.sections():
        assert set(unit[section]) <= KEYS[section]


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong_where_there_is_one(name, tmp_path):
    text = (DEPLOY / name).read_text()
    (tmp_path / name).write_text(text.replace("/opt/isoloco/.venv/bin/python", sys.executable))
    found = ""
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [analyze, "verify", tmp_path / name], capture_output=True, text=True, timeout=60
        )
        found = done.stdout + done.stderr
    assert name not in found


@pytest.mark.parametrize("name", UNITS)
def test_units_start_commands_that_there_are(name):
    python, *arguments = shlex.split(read_unit(name)["Service"]["ExecStart"])
    assert python == "/opt/isoloco/.venv/bin/python"
    assert arguments[:2] == ["-m", "deploy"]
    assert_is_a_command(arguments[2:])


def test_the_compose_file_is_one():
    check = Path(sys.executable).with_name("check-jsonschema")
    schema = ["--builtin-schema", "vendor.compose-spec"]
    subprocess.run([check, *schema, DEPLOY / "compose.yaml"], check=True, timeout=60)


@pytest.mark.parametrize("service", ["server", "site"])
def test_compose_services_start_commands_that_there_are(service):
    assert_is_a_command(compose()["services"][service]["command"])


@pytest.mark.parametrize("service", ["server", "site"])
def test_containers_change_nothing_but_their_state(service):
    volumes = compose()["services"][service]["volumes"]
    assert [volume for volume in volumes if not volume.endswith(":ro")] == [
        next(volume for volume in volumes if volume.endswith(":/state"))
    ]
    assert compose()["services"][service]["read_only"]


def test_the_image_takes_no_folder_that_may_hold_keys():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    assert [name for names in copied for name in names] == [
        *("pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
        *("isoloco_flwr", "clients", "server_app", "deploy"),
    ]

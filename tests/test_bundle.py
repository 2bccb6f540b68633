"""The app's bundle and the wheel: every module that is needed, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("isoloco_flwr", "clients", "server_app")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Copy what git has of this checkout, and leave lying about what must stay at home."""
    folder = tmp_path_factory.mktemp("clean") / "isoloco-flwr"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for name in (
        "keys/ca.key",
        "keys/site-a.key",
        "keys/notes.md",
        "clients/site-a.key",
        "server_app/server.pem",
        "runs/demo/config.json",
        "server/flwr/config.toml",
        "site/node-config.toml",
        "isoloco_flwr/corpus.jsonl",
        "isoloco_flwr/__pycache__/records.cpython-311.pyc",
        "node-config.toml",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    return folder


@pytest.fixture(scope="module")
def bundle(clone, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "build", "--app", clone], cwd=folder, check=True, timeout=120)
    [path] = folder.glob("*.fab")
    return path


def modules(clone: Path, packages: tuple[str, ...]) -> set[str]:
    found = (path for package in packages for path in (clone / package).rglob("*.py"))
    return {path.relative_to(clone).as_posix() for path in found}


def test_the_bundle_holds_the_app_and_nothing_else(clone, bundle):
    others = {"pyproject.toml", "README.md", "LICENSE", ".info/CONTENT"}
    assert set(zipfile.ZipFile(bundle).namelist()) == modules(clone, PACKAGES) | others


def test_the_bundle_is_small(bundle):
    assert bundle.stat().st_size < 1_000_000


def test_the_bundle_starts_alone(bundle, tmp_path):
    zipfile.ZipFile(bundle).extractall(tmp_path)
    # Neither the checkout nor an editable install of it is on the path; other packages are.
    program = f"""
import pkgutil, sys
root = {str(ROOT)!r}
sys.path[:] = [{str(tmp_path)!r}] + [path for path in sys.path if path and path != root]
import clients.client_app, server_app.server_app
for package in {PACKAGES!r}:
    for module in pkgutil.walk_packages([{str(tmp_path)!r} + "/" + package], package + "."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
outside = [name for name in sys.modules if name.split(".")[0] in ("deploy", "simulations")]
assert not outside, outside
for package in {PACKAGES!r}:
    assert sys.modules[package].__file__.startswith({str(tmp_path)!r})
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_library_and_nothing_else(clone, tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", tmp_path, clone], check=True, timeout=240)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    library = {name for name in names if ".dist-info/" not in name}
    assert library == modules(clone, ("isoloco_flwr",)) | {"isoloco_flwr/py.typed"}
    assert wheel.stat().st_size < 1_000_000
    assert not [name for name in names if name.endswith((".key", ".pem", ".jsonl"))]

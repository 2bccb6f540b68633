"""What a killed owner has started ends with it, and nothing else does."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from simulations.guard import guarded

OWNER = """
import os, sys, time
from pathlib import Path
from simulations.guard import guarded
lock = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
import fcntl; fcntl.flock(lock, fcntl.LOCK_EX)
# A child in a session of its own, as Ray's and Flower's are, that does not want to end.
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
command = f'''
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
Path({sys.argv[1]!r}).write_text(str(child.pid))
time.sleep(300)
'''
with guarded([sys.executable, "-c", command], environment=os.environ, folder=Path("/"),
             log=open(os.devnull, "w"), keep_open=[lock]):
    time.sleep(300)
"""

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(process_id: int) -> bool:
    try:
        return (Path("/proc") / str(process_id) / "cmdline").read_bytes() != b""
    except OSError:
        return False


def test_all_ends_with_a_killed_owner_before_the_lock_is_free(tmp_path):
    told, lock = tmp_path / "child", tmp_path / "lock"
    # The same command in the same folder, but not the owner's.
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(told), str(lock)])
    wait_for(lambda: told.exists() and told.read_text())
    child = int(told.read_text())
    assert lives(child)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert not lives(child)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_no_process_sees_another_end(tmp_path):
    started, noticed = tmp_path / "started", tmp_path / "noticed"
    # As a ServerApp, which would go on with a round without the worker that has ended.
    command = f"""
import signal, subprocess
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)  # its children end by it
workers = [subprocess.Popen({SLEEP!r}, start_new_session=True) for _ in range(5)]
Path({str(started)!r}).touch()
workers[0].wait()
Path({str(noticed)!r}).touch()
"""
    with guarded(
        [sys.executable, "-c", command],
        environment=os.environ,
        folder=tmp_path,
        log=subprocess.DEVNULL,
    ):
        wait_for(started.exists)
    assert not noticed.exists()


def test_a_child_that_has_lost_its_environment_ends_too(tmp_path):
    told = tmp_path / "child"
    # Ray's agents write their names over theirs.
    command = f"""
import subprocess, time
from pathlib import Path
child = subprocess.Popen({SLEEP!r}, start_new_session=True, env={{}})
Path({str(told)!r}).write_text(str(child.pid))
time.sleep(300)
"""
    with guarded(
        [sys.executable, "-c", command],
        environment=os.environ,
        folder=tmp_path,
        log=subprocess.DEVNULL,
    ):
        wait_for(lambda: told.exists() and told.read_text())
        child = int(told.read_text())
        assert lives(child)
    assert not lives(child)


def test_one_guard_leaves_the_processes_of_another_alone(tmp_path):
    arguments = {"environment": os.environ, "folder": tmp_path, "log": subprocess.DEVNULL}
    with guarded(SLEEP, **arguments) as other:
        with guarded(SLEEP, **arguments) as first:
            assert first.poll() is None
        assert first.poll() is not None
        assert other.poll() is None


def test_the_guard_has_the_exit_code_of_its_command(tmp_path):
    command = [sys.executable, "-c", "import sys; print('said'); sys.exit(3)"]
    with guarded(command, environment=os.environ, folder=tmp_path, log=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("said\n", 3)

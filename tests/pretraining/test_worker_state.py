"""A worker's optimizer state survives between rounds, and only as it was."""

import copy
import errno
import os

import pytest
import torch

from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer
from isoloco_flwr.pretraining.worker_state import (
    WorkerStateError,
    age_state,
    load_worker_state,
    newest_state,
    save_worker_state,
)

H, ROUNDS = 3, 3


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(257, (2, 9), generator=generator)


def fresh():
    model = build_model("demo", vocabulary_size=257, seed=0)
    return model, build_inner_optimizer("adamw", model, lr=1e-3)


def train(model, optimizer, first_step, steps):
    run_inner_steps(
        model,
        optimizer,
        batch,
        first_step=first_step,
        steps=steps,
        total_steps=H * ROUNDS,
    )


def in_rounds(folder, forget=False):
    """Train in rounds with a new optimizer each, as a worker does that lives for one message."""
    model, _ = fresh()
    for number in range(1, ROUNDS + 1):
        optimizer = build_inner_optimizer("adamw", model, lr=1e-3)
        if not forget:
            restored = load_worker_state(folder, optimizer, round_number=number - 1)
            assert restored == (number > 1)
        train(model, optimizer, (number - 1) * H, H)
        save_worker_state(folder, optimizer, round_number=number)
    return model.state_dict()


def test_rounds_equal_one_unbroken_run(tmp_path):
    model, optimizer = fresh()
    train(model, optimizer, 0, H * ROUNDS)
    state = in_rounds(tmp_path / "kept")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    forgetful = in_rounds(tmp_path / "lost", forget=True)
    assert not torch.equal(forgetful["lm_head.weight"], state["lm_head.weight"])


def saved(folder, rounds, **keywords):
    model, optimizer = fresh()
    train(model, optimizer, 0, 1)
    for number in rounds:
        save_worker_state(folder, optimizer, round_number=number, **keywords)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_rounds_stay(tmp_path):
    saved(tmp_path, [1, 2, 3])
    assert files(tmp_path) == ["round-000002.safetensors", "round-000003.safetensors"]


def test_the_checkpointed_round_stays(tmp_path):
    saved(tmp_path, [1, 2, 3, 4], keep_from=2)
    assert files(tmp_path) == [f"round-00000{number}.safetensors" for number in (2, 3, 4)]


def test_going_back_drops_what_came_after(tmp_path):
    saved(tmp_path, [1, 2, 3, 4], keep_from=1)
    saved(tmp_path, [3], keep_from=2)
    assert files(tmp_path) == ["round-000002.safetensors", "round-000003.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "flip", "rename"])
def test_a_damaged_file_is_named(damage, tmp_path):
    saved(tmp_path, [1])
    path = tmp_path / "round-000001.safetensors"
    data = bytearray(path.read_bytes())
    number = 1
    if damage == "cut":
        path.write_bytes(data[:-10])
    elif damage == "flip":
        data[-10] ^= 1
        path.write_bytes(data)
    else:
        path.rename(tmp_path / "round-000002.safetensors")
        number = 2
    _, optimizer = fresh()
    with pytest.raises(WorkerStateError, match=f"round-00000{number}.safetensors"):
        load_worker_state(tmp_path, optimizer, round_number=number)
    assert optimizer.state_dict()["state"] == {}


def test_another_models_state_is_refused(tmp_path):
    saved(tmp_path, [1])
    model = build_model("demo", vocabulary_size=99, seed=0)
    optimizer = build_inner_optimizer("adamw", model, lr=1e-3)
    with pytest.raises(WorkerStateError, match="another model"):
        load_worker_state(tmp_path, optimizer, round_number=1)


def test_another_optimizers_state_is_refused(tmp_path):
    model, _ = fresh()
    group = {"params": list(model.parameters()), "peak_lr": 1e-3}
    train(model, momentum := torch.optim.SGD([group], lr=1e-3, momentum=0.9), 0, 1)
    save_worker_state(tmp_path, momentum, round_number=1)
    _, adamw = fresh()
    with pytest.raises(WorkerStateError, match="the state of SGD, not of AdamW"):
        load_worker_state(tmp_path, adamw, round_number=1)
    assert adamw.state_dict()["state"] == {}


def test_a_full_disk_leaves_the_older_state_and_nothing_else(tmp_path, monkeypatch):
    saved(tmp_path, [1])

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            saved(tmp_path, [2])
    assert files(tmp_path) == ["round-000001.safetensors"]
    _, optimizer = fresh()
    assert load_worker_state(tmp_path, optimizer, round_number=1)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_age_is_what_steps_without_a_gradient_do(name):
    model = build_model("demo", vocabulary_size=257, seed=0)
    optimizer = build_inner_optimizer(name, model, lr=1e-3)
    train(model, optimizer, 0, 2)
    aged = build_inner_optimizer(name, model, lr=1e-3)
    aged.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    age_state(aged, 5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    expected, state = optimizer.state_dict()["state"], aged.state_dict()["state"]
    assert state.keys() == expected.keys()
    for index, values in expected.items():
        assert state[index].keys() == values.keys()
        for key, value in values.items():
            if value is not None:
                torch.testing.assert_close(state[index][key], value)


def test_the_newest_state_up_to_a_round_is_found(tmp_path):
    assert newest_state(tmp_path / "nothing", up_to=9) == 0
    saved(tmp_path, [2, 3, 7], keep_from=1)
    assert [newest_state(tmp_path, up_to=number) for number in (1, 2, 6, 7, 9)] == [0, 2, 3, 7, 7]


def test_what_a_killed_process_left_goes_with_the_next_state(tmp_path):
    left = tmp_path / ".part-killed"
    left.mkdir()
    (left / "half").write_bytes(b"x" * 1000)
    saved(tmp_path, [1])
    assert files(tmp_path) == ["round-000001.safetensors"]


def test_the_file_that_stays_is_the_one_that_was_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    flush = os.fsync

    def noting(descriptor):
        flushed.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noting)
        saved(tmp_path, [1])
    found = (tmp_path / "round-000001.safetensors").stat()
    assert flushed == [(found.st_ino, found.st_size)]

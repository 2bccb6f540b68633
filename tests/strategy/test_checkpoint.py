"""A resumed run is the unbroken one, and a damaged checkpoint is never believed."""

import json
import shutil

import pytest
import torch
from rounds import LoopbackGrid, random_model, record

from isoloco_flwr import DiLoCo, IsoLoCo, LocalSGD
from isoloco_flwr.checkpoint import (
    ChangedSettingsError,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def start(strategy, num_rounds, **keywords):
    """Run rounds over four nodes that each take their own random step."""
    seen = []

    def work(node, sent, config):
        step = random_model(100 * config["server-round"] + node)
        return {name: value - 0.1 * step[name] for name, value in sent.items()}

    def evaluate(server_round, arrays):
        seen.append(server_round)

    result = strategy.start(
        LoopbackGrid(num_nodes=4, work=work),
        record(random_model(0)),
        num_rounds=num_rounds,
        evaluate_fn=evaluate,
        **keywords,
    )
    return {name: array.data for name, array in result.arrays.items()}, seen


def make(preset=IsoLoCo, **keywords):
    return preset(fraction_evaluate=0.0, fraction_train=0.5, **keywords)


@pytest.mark.parametrize("preset", [LocalSGD, DiLoCo, IsoLoCo])
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_is_the_unbroken_one(preset, every, tmp_path):
    unbroken, _ = start(make(preset), 5)
    start(make(preset), 3, checkpoint_dir=tmp_path, checkpoint_every=every)
    shutil.rmtree(tmp_path / "round-000003")  # as if killed before it was written
    resumed, seen = start(
        make(preset), 5, checkpoint_dir=tmp_path, checkpoint_every=every, resume=True
    )
    assert resumed == unbroken
    assert seen == [3, 4, 5]


def test_losing_the_momentum_would_be_seen(tmp_path):
    unbroken, _ = start(make(), 3)
    start(make(), 2, checkpoint_dir=tmp_path)
    checkpoint = newest_checkpoint(tmp_path)
    forgetful = Checkpoint(2, checkpoint.parameters, {}, checkpoint.settings)
    save_checkpoint(tmp_path, forgetful)
    resumed, _ = start(make(), 3, checkpoint_dir=tmp_path, resume=True)
    assert resumed != unbroken


def test_a_finished_run_is_resumed_to_its_result(tmp_path):
    finished, _ = start(make(), 2, checkpoint_dir=tmp_path)
    resumed, seen = start(make(), 2, checkpoint_dir=tmp_path, resume=True)
    assert resumed == finished
    assert seen == []


def test_the_newest_checkpoints_stay(tmp_path):
    start(make(), 5, checkpoint_dir=tmp_path, checkpoints_kept=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000003",
        "round-000004",
        "round-000005",
    ]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, remove])
@pytest.mark.parametrize(
    "name", ["parameters.safetensors", "momentum.safetensors", "checkpoint.json"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, name, tmp_path):
    unbroken, _ = start(make(), 4)
    start(make(), 3, checkpoint_dir=tmp_path)
    damage(tmp_path / "round-000003" / name)
    with pytest.raises(CheckpointError, match="round-000003"):
        load_checkpoint(tmp_path / "round-000003")
    resumed, seen = start(make(), 4, checkpoint_dir=tmp_path, resume=True)
    assert seen == [3, 4]
    assert resumed == unbroken


def test_an_edited_round_number_is_refused(tmp_path):
    start(make(), 1, checkpoint_dir=tmp_path)
    path = tmp_path / "round-000001" / "checkpoint.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "round": 7}))
    with pytest.raises(CheckpointError, match="edited"):
        load_checkpoint(path.parent)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    start(make(), 1, checkpoint_dir=tmp_path)
    path = tmp_path / "round-000001" / "checkpoint.json"
    path.write_text(json.dumps({"format": "something else", "sha256-of-this": ""}))
    with pytest.raises(CheckpointError, match="something else"):
        load_checkpoint(path.parent)


def test_what_a_killed_save_left_is_cleared_away(tmp_path):
    start(make(), 1, checkpoint_dir=tmp_path)
    (tmp_path / ".part-dead").mkdir()
    (tmp_path / ".part-dead" / "parameters.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path).server_round == 1
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]


def test_changed_settings_are_refused_unless_asked_for(tmp_path):
    start(make(), 1, checkpoint_dir=tmp_path)
    changed = {"outer_lr": 0.5}
    with pytest.raises(ChangedSettingsError, match=r"outer-lr was 1\.8, is 0\.5"):
        start(make(**changed), 2, checkpoint_dir=tmp_path, resume=True)
    _, seen = start(
        make(**changed), 2, checkpoint_dir=tmp_path, resume=True, allow_changed_settings=True
    )
    assert seen == [2]


def test_another_runs_checkpoints_are_not_overwritten(tmp_path):
    start(make(), 1, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="checkpoints of another run"):
        start(make(), 1, checkpoint_dir=tmp_path)


def test_every_kind_of_tensor_comes_back(tmp_path):
    tensors = {
        "z": torch.ones(2, dtype=torch.bfloat16),
        "a": torch.tensor(3),
        "m": torch.zeros((), dtype=torch.float64),
        "b": torch.tensor([True, False]),
        "t": torch.arange(6.0).view(2, 3).T,
        "e": torch.zeros(0, 3),
    }
    path = save_checkpoint(tmp_path, Checkpoint(1, tensors, {}, {}))
    loaded = load_checkpoint(path).parameters
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_without_a_single_good_round_the_result_is_the_initial_model():
    strategy = make(min_train_replies=5)
    final, _ = start(strategy, 2)
    assert final == {name: array.data for name, array in record(random_model(0)).items()}


@pytest.mark.parametrize("name", ["checkpoint_every", "checkpoints_kept"])
def test_a_bad_number_is_shown(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}=0: allowed is a number >= 1"):
        start(make(), 1, checkpoint_dir=tmp_path, **{name: 0})

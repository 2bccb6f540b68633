"""A node config is taken whole or refused with one line."""

import pytest

from clients.site import parse_site
from isoloco_flwr.fields import SettingsError

PLACE = {"partition-id": 1, "num-partitions": 3}


def test_the_place_alone_is_enough():
    site = parse_site(PLACE)
    assert (site.partition_id, site.num_partitions) == (1, 3)
    assert str(site.torch_device()) == "cpu"
    assert site.micro_batch_size(0) == 0


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("partition-id", 3, "0 <= partition-id < 3"),
        ("partition-id", -1, "a whole number >= 0"),
        ("partition-id", "1", "a whole number >= 0"),
        ("num-partitions", 0, "a whole number >= 1"),
        ("data-source", "/not/there", "a file or folder that is there"),
        ("data-source", 7, "a text"),
        ("device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("state-folder", "states", "an absolute path"),
        ("max-batch-size", -1, "a whole number >= 0"),
        ("max-batch-size", 2.5, "a whole number >= 0"),
        ("max-seconds", -1, "a number >= 0"),
        ("max-seconds", float("inf"), "a number >= 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key, value, allowed):
    with pytest.raises(SettingsError) as error:
        parse_site({**PLACE, key: value})
    message = str(error.value)
    assert f"node config {key} = {value!r}: " in message
    assert allowed in message
    assert "\n" not in message


def test_a_missing_place_is_named():
    with pytest.raises(SettingsError, match="node config num-partitions is missing: it takes"):
        parse_site({"partition-id": 0})


@pytest.mark.parametrize(
    ("slip", "meant"), [("data_source", "data-source"), ("max-second", "max-seconds")]
)
def test_a_slip_of_the_pen_is_answered_with_the_right_key(slip, meant):
    with pytest.raises(SettingsError, match=f"node config {slip} = 7: did you mean {meant}"):
        parse_site({**PLACE, slip: 7})


def test_another_app_s_key_is_left_alone():
    assert parse_site({**PLACE, "dataset-path": "/images"}) == parse_site(PLACE)


@pytest.mark.parametrize(
    ("run_wide", "cap", "used"), [(0, 0, 0), (8, 0, 8), (0, 4, 4), (8, 4, 4), (2, 4, 2)]
)
def test_the_smaller_cap_holds(run_wide, cap, used):
    assert parse_site({**PLACE, "max-batch-size": cap}).micro_batch_size(run_wide) == used


def test_the_state_folder_is_made(tmp_path):
    folder = tmp_path / "a" / "b"
    assert parse_site({**PLACE, "state-folder": str(folder)}).states() == folder
    assert list(folder.iterdir()) == []

"""What a site's operator is told, by real TLS servers with something wrong."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from https import listening

from deploy import check
from deploy.check import Finding, check_site
from deploy.keys import make_authority, make_node_key, make_server_certificate
from deploy.site import Site


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_authority(tmp_path / "keys")
    make_server_certificate(tmp_path / "keys", [])
    make_node_key(tmp_path / "keys", "site-a")
    return tmp_path / "keys"


@pytest.fixture
def ask(tmp_path: Path, keys: Path):
    """Check a site that is right but for what is given, and return what is bad."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("some text")

    def find(server: str, **settings) -> dict[str, Finding]:
        right = {
            "authority": keys / "ca.pem",
            "key": keys / "site-a.key",
            "data": str(tmp_path / "texts"),
            "state": tmp_path / "state",
        }
        site = Site(server=server, place=0, sites=1, **{**right, **settings})
        bad = [finding for finding in check_site(site) if not finding.good]
        assert all("\n" not in finding.text for finding in bad)
        # These servers know no keys of sites.
        return {finding.subject: finding for finding in bad if finding.subject != "registration"}

    return find


def test_nothing_is_wrong_with_a_right_site(ask, keys):
    with listening(keys) as server:
        assert ask(server) == {}


def test_another_authority(ask, keys, tmp_path):
    make_authority(tmp_path / "others")
    with listening(keys) as server:
        bad = ask(server, authority=tmp_path / "others" / "ca.pem")
    assert list(bad) == ["certificate"]
    assert "was not made by the authority" in bad["certificate"].text


@pytest.mark.parametrize(
    ("start", "reason"), [(-3, "has expired"), (3, "is not valid yet")], ids=["expired", "early"]
)
def test_a_certificate_out_of_its_time(ask, tmp_path, start, reason):
    folder = tmp_path / "out-of-time"
    make_authority(folder)
    begin = datetime.now(UTC) + timedelta(days=start)
    make_server_certificate(folder, [], days=1, now=begin)
    with listening(folder) as server:
        bad = ask(server, authority=folder / "ca.pem")
    assert list(bad) == ["certificate"]
    assert reason in bad["certificate"].text
    assert not bad["certificate"].passing


def test_a_certificate_for_another_host(ask, keys):
    with listening(keys, host="127.0.0.2") as server:
        bad = ask(server)
    assert list(bad) == ["certificate"]
    assert "is not for '127.0.0.2'" in bad["certificate"].text


def test_a_server_without_tls(ask):
    with listening(None) as server:
        bad = ask(server)
    assert list(bad) == ["server"]
    assert "does not speak TLS" in bad["server"].text
    assert not bad["server"].passing


@pytest.mark.parametrize("server", ["http://127.0.0.1:9092", "127.0.0.1", "a:b:9092"])
def test_only_host_and_port_are_taken(ask, server):
    bad = ask(server)
    assert "allowed is HOST:PORT" in bad["server"].text


def test_nobody_listens(ask, keys):
    with listening(keys) as server:
        pass
    bad = ask(server)
    assert "refuses connections" in bad["server"].text
    assert bad["server"].passing


def test_a_host_that_nobody_knows(ask):
    bad = ask("no-such-host.invalid:9092")
    assert "is not known here" in bad["server"].text


@pytest.mark.parametrize(("ahead", "side"), [(400, "behind"), (-60, "ahead of")])
def test_a_clock_that_flower_would_refuse(ask, keys, ahead, side):
    with listening(keys, ahead=ahead) as server:
        bad = ask(server)
    assert list(bad) == ["clock"]
    assert f"s {side} the server's" in bad["clock"].text


def test_another_flower(ask, keys):
    with listening(keys, version="1.99.0") as server:
        bad = ask(server)
    assert "pip install flwr==1.99.0" in bad["flwr"].text


def test_missing_files_and_devices_are_all_told_at_once(ask, tmp_path, keys):
    (tmp_path / "state-is-a-file").touch()
    with listening(keys) as server:
        bad = ask(
            server,
            key=tmp_path / "no.key",
            data=str(tmp_path / "nothing"),
            state=tmp_path / "state-is-a-file",
            device="cuda:77",
            authority=tmp_path / "no.pem",
        )
    assert set(bad) == {"key", "data", "disk", "device", "certificate"}
    assert "allowed is auto, cpu" in bad["device"].text


def test_too_little_room(ask, keys, monkeypatch):
    monkeypatch.setattr(check, "MIN_FREE_BYTES", 1 << 62)
    with listening(keys) as server:
        assert "GB free" in ask(server)["disk"].text

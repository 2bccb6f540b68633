"""A run through everything that can happen to its sites and servers, in an order of a seed."""

import json
import random
import re
import signal
import time

import pytest
from federation import Federation, wait_for
from sites import BATCH, RUN_CONFIG, answer, checkpoint, vector, whose_mean

from isoloco_flwr.checkpoint import load_checkpoint

SITES, ROUNDS = 3, 8


class Chaos:
    """A federation of three sites, and the run that goes on whatever happens."""

    def __init__(self, federation: Federation, seed: int) -> None:
        self.federation = federation
        self.output = federation.folder / "output"
        self.random = random.Random(seed)
        self.runs = 0

    def rows(self):
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def start_run(self):
        self.runs += 1
        self.run = self.federation.run(
            {
                **RUN_CONFIG,
                "num-server-rounds": ROUNDS,
                "global-batch-size": SITES * BATCH,
                "output-dir": str(self.output),
                "resume": True,
                "min-sites": 1,
                "round-timeout": 60,
            },
            name=f"run-{self.runs}",
        )

    def finish_round(self):
        """Wait until the round that is open is done."""
        number = len(self.rows())
        wait_for(lambda: len(self.rows()) > number or self.run.poll() is not None, 400, "a round")
        assert self.run.poll() is None, self.log()

    def wait_for_log(self, text, start):
        """Wait until a pattern is in the log after its first `start` characters."""
        wait_for(lambda: re.search(text, self.log()[start:]), 400, f"the log to say {text!r}")

    def log(self):
        return "".join(self.federation.log(f"run-{number + 1}") for number in range(self.runs))

    def kill_site(self):
        """Kill -9 a site and start it again at once."""
        time.sleep(self.random.uniform(0, 10))  # somewhere in the round
        site = self.random.randrange(SITES)
        assert self.federation.signal(f"site-{site}", signal.SIGKILL) >= 1
        self.federation.start_site(site, SITES)
        return f"Site {site} is back as node"

    def freeze_site(self):
        """Stop a site, before it can have answered, until the round is over."""
        site = self.random.randrange(SITES)
        assert self.federation.signal(f"site-{site}", signal.SIGSTOP) >= 1
        self.finish_round()
        self.federation.signal(f"site-{site}", signal.SIGCONT)
        return f"Site {site} (has not answered in time|is gone)"

    def cut_site(self):
        """Cut a site off, before it can have answered, until the round is over."""
        site = self.random.randrange(SITES)
        self.federation.cables[site].cut()
        self.finish_round()
        self.federation.cables[site].mend()
        return f"Site {site} (has not answered in time|is gone)"

    def kill_serverapp(self):
        """Kill -9 the ServerApp and start the run again, as an operator does."""
        time.sleep(self.random.uniform(0, 10))  # somewhere in the round
        assert self.federation.signal("superlink", signal.SIGKILL, having="flwr-serverapp") == 1
        self.run.wait(timeout=240)
        self.start_run()
        return "Resuming after round"

    def restart_superlink(self):
        """Kill -9 the SuperLink with all it has started, and start both it and the run again."""
        time.sleep(self.random.uniform(0, 10))  # somewhere in the round
        assert self.federation.signal("superlink", signal.SIGKILL) >= 1
        self.run.wait(timeout=240)
        self.federation.start_superlink()
        self.start_run()
        return "Resuming after round"


@pytest.fixture
def chaos(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOCO_CACHE", str(tmp_path / "cache"))
    with Federation(tmp_path) as federation:
        yield Chaos(federation, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_through_everything(chaos):
    chaos.federation.start_superlink()
    for site in range(SITES):
        chaos.federation.start_site(site, SITES)
    chaos.start_run()
    events = [
        chaos.kill_site,
        chaos.freeze_site,
        chaos.cut_site,
        chaos.kill_serverapp,
        chaos.restart_superlink,
    ]
    chaos.random.shuffle(events)
    chaos.finish_round()  # 0, the look at the model before training
    for event in events:
        chaos.finish_round()
        already = len(chaos.log())
        chaos.wait_for_log(event(), already)
    chaos.run.wait(timeout=900)

    rows = chaos.rows()
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1)), chaos.log()
    assert (chaos.output / "model" / "model.safetensors").exists()
    names = sorted(path.name for path in (chaos.output / "checkpoints").iterdir())
    assert names == [f"round-{number:06d}" for number in range(1, ROUNDS + 1)]
    for name in names:
        assert load_checkpoint(chaos.output / "checkpoints" / name).server_round == int(name[6:])
    for row in rows[1:]:
        start, end = (checkpoint(chaos.output, row["round"] - before) for before in (1, 0))
        assert vector(end).isfinite().all()
        if row["replies-used"] == 0:
            assert vector(end).equal(vector(start))
            continue
        answers = [
            answer(start, server_round=row["round"], place=place, places=SITES, rounds=ROUNDS)
            for place in range(SITES)
        ]
        assert len(whose_mean(answers, [1] * SITES, vector(end))) == row["replies-used"]
    assert sum(row["replies-used"] > 0 for row in rows) > ROUNDS / 2

"""The report of an experiment from results that are made up, so that its numbers are known."""

import copy
import itertools
import re
import statistics
from html.parser import HTMLParser

import pytest
from browser import browser
from made_up import EXPERIMENT, LOSSES, PARAMETERS, ROUNDS, loss_of, outcome

from simulations.experiment import final_runs, load_experiment, tuning_runs
from simulations.outcome import read_results
from simulations.report import Unfinished, degradation, spread, write_report


class Page(HTMLParser):
    """Headings, tables, pictures and all attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[dict] = [{"heading": "", "rows": [], "pictures": 0}]
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self._cell: list[str] | None = None
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [given[key] for key in ("src", "href", "srcset", "data") if key in given]
        self.ids.add(given.get("id"))
        if tag == "section":
            self.sections.append({"heading": "", "rows": [], "pictures": 0})
        elif tag == "img":
            self.sections[-1]["pictures"] += 1
        elif tag == "tr":
            self.sections[-1]["rows"].append([])
        elif tag in ("td", "th", "h2"):
            self._cell = []

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.sections[-1]["rows"][-1].append("".join(self._cell))
        elif tag == "h2":
            self.sections[-1]["heading"] = "".join(self._cell)
        if tag in ("td", "th", "h2"):
            self._cell = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def table(self, heading: str) -> list[dict[str, str]]:
        (section,) = [one for one in self.sections if one["heading"].startswith(heading)]
        head, *rows = section["rows"]
        return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    path = tmp_path_factory.mktemp("experiment") / "merges.toml"
    path.write_text(EXPERIMENT)
    return load_experiment(str(path))


@pytest.fixture(scope="module")
def outcomes(experiment):
    scale = experiment.scales["laptop"]
    tuning = tuning_runs(scale)
    final, untuned = final_runs(scale, {run.name: loss_of(run) for run in tuning})
    assert not untuned
    runs = {run.name: run for run in [*tuning, *final]}
    return [outcome(run) for run in runs.values()]


@pytest.fixture(scope="module")
def folder(experiment, outcomes, tmp_path_factory):
    """Return the folder of a complete report."""
    folder = tmp_path_factory.mktemp("complete")
    write_report(experiment, "laptop", outcomes, [], folder)
    return folder


@pytest.fixture
def page(folder):
    return Page((folder / "index.html").read_text())


@pytest.fixture
def write(experiment, tmp_path):
    def write_page(outcomes, unfinished=()) -> Page:
        page = write_report(experiment, "laptop", outcomes, unfinished, tmp_path)
        return Page(page.read_text())

    return write_page


def test_the_table_of_losses_has_means_and_deviations_over_seeds(page):
    rows = page.table("Final held-out loss")
    found = {(row["method"], row["workers"]): row for row in rows}
    assert len(found) == len(rows) == 5
    for (method, workers), row in found.items():
        exact = LOSSES[method] + (0 if method == "data-parallel" else int(workers) / 8)
        assert row["loss"] == f"{exact + 0.01:.4f}"
        assert row["deviation"] == f"{statistics.stdev([0, 0.02]):.4f}"
        assert row["seeds"] == "2"
        tuned = "strategy.outer-lr = 0.7" if method == "diloco" else "-"
        assert row["tuned"] == tuned


def test_degradation_is_relative_to_the_mean_of_the_data_parallel_runs(page):
    rows = page.table("Degradation")
    found = {(row["method"], row["workers"]): float(row["per cent"]) for row in rows}
    baseline = 2.01
    assert found == {
        (method, str(workers)): pytest.approx(
            100 * (LOSSES[method] + workers / 8 + 0.01 - baseline) / baseline, abs=0.005
        )
        for method, workers in itertools.product(("diloco", "isoloco"), (2, 4))
    }


def test_one_seed_is_called_so_and_has_no_deviation(write, outcomes):
    rows = write([run for run in outcomes if run.point["seed"] == "0"]).table("Final")
    assert {row["deviation"] for row in rows} == {"one seed"}


def test_every_picture_has_its_table_and_its_file(page, folder):
    with_pictures = [one for one in page.sections if one["pictures"]]
    assert len(with_pictures) == 6
    assert all(len(one["rows"]) > 1 for one in with_pictures)
    files = list(folder.glob("*.png"))
    assert len(files) == sum(one["pictures"] for one in page.sections)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_curves_are_given_point_by_point_over_tokens_and_bytes(page):
    over_tokens = [row for row in page.table("Loss against tokens") if "isoloco" in row["runs"]]
    assert len(over_tokens) == 2 * (ROUNDS + 1)
    assert over_tokens[4]["tokens, millions"] == f"{ROUNDS * 5120 / 1e6:.4g}"
    assert over_tokens[4]["loss"] == f"{2.25 + 2 / 8 + 0.01:.4f}"
    by_run = {}
    for row in page.table("Loss against bytes"):
        by_run.setdefault(row["runs"], []).append(float(row["MB a worker"]))
    # Of every worker's own: 8 kB a round; data-parallel 8 bytes a parameter and inner step.
    assert by_run["isoloco, workers 4"] == pytest.approx([0.008, 0.016, 0.024, 0.032])
    a_round = 8 * PARAMETERS * 5 / 1e6
    assert by_run["data-parallel"] == pytest.approx([a_round * n for n in (1, 2, 3, 4)])


def test_tuning_diagnostics_and_times_are_shown(page):
    tuning = page.table("Tuning")
    assert [row["loss"] for row in tuning] == ["3.0500", "2.7500", "3.3000", "3.0000"]
    seen = page.table("What the merge saw")
    assert {row["method"] for row in seen} == {"isoloco"}
    assert {row["interference"] for row in seen} == {"0.375"}
    assert {row["condition"] for row in seen} == {"7"}
    times = {row["method"]: row for row in page.table("Time and bytes")}
    assert times["diloco"]["train-seconds"] == "1.500"
    assert times["diloco"]["minutes a run"] == "0.2"


def test_what_has_not_finished_is_named_with_the_reason(page, write, outcomes):
    cut = write(outcomes[:-1], [Unfinished(outcomes[-1].run, "failed: no room <left>")])
    (row,) = cut.table("What could not be run")
    assert row == {"run": outcomes[-1].run, "why": "failed: no room <left>"}
    assert "Not complete" in cut.text
    assert "Not complete" not in page.text


def test_nothing_finished_makes_a_page_without_pictures(write, tmp_path):
    page = write([], [Unfinished("all", "not started")])
    assert page.text.count("No finished run has this.") == 6
    assert not list(tmp_path.glob("*.png"))


def test_a_run_that_diverged_is_shown_as_it_is(write, outcomes):
    diverged = copy.deepcopy(outcomes)
    for run in diverged:
        if run.point["method"] == "diloco":
            run.rows[-1]["eval-loss"] = float("nan")
    rows = write(diverged).table("Final held-out loss")
    assert {row["loss"] for row in rows if row["method"] == "diloco"} == {"nan"}


def test_a_run_that_lost_replies_is_named_with_their_number(page, write, outcomes):
    short = copy.deepcopy(outcomes)
    run = next(run for run in short if run.point["method"] == "diloco" and run.workers > 1)
    run.rows[1]["replies-used"] -= 1
    run.rows[-1]["replies-used"] = 0
    assert f"than the others: {run.run} ({run.workers + 1})." in write(short).text
    assert "no outer step" not in page.text


def test_the_page_needs_nothing_but_itself(page, folder):
    assert page.addresses
    inner = [address for address in page.addresses if address.startswith("#")]
    assert {address[1:] for address in inner} <= page.ids
    outer = [address for address in page.addresses if not address.startswith("#")]
    assert all(address.startswith("data:image/png;base64,") for address in outer)
    text = (folder / "index.html").read_text()
    assert not re.search(r"url\(|@import|<script|<link", text)


def test_the_commands_are_there_as_they_are_typed(page, outcomes):
    assert (
        "python -m simulations run merges.toml\npython -m simulations report merges.toml"
        in page.text
    )
    for run in outcomes:
        assert f"# {run.run}\n{run.command}" in page.text


def test_the_same_results_give_the_same_bytes(experiment, outcomes, folder, tmp_path):
    write_report(experiment, "laptop", outcomes, [], tmp_path)
    first, second = (
        {path.name: path.read_bytes() for path in place.iterdir()} for place in (folder, tmp_path)
    )
    assert first == second


def test_the_results_are_kept_whole(outcomes, folder):
    assert read_results(folder / "results.jsonl") == outcomes


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_it_is_readable_at_this_width(page, folder, tmp_path, width):
    with browser(tmp_path / "profile") as window:
        window.open(folder / "index.html", width)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        # Every picture was decoded and is not shrunk to nothing; the whole page is its picture.
        shown = window.evaluate("[...document.images].map(i => i.complete && i.clientWidth)")
        assert len(shown) == sum(section["pictures"] for section in page.sections)
        assert all(300 <= pixels <= width for pixels in shown)
        # With every table unfolded as well, which scroll inside the page.
        window.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.evaluate("performance.getEntriesByType('resource').length") == 0
        window.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_spread_and_degradation():
    assert spread([1.0]).deviation == 0
    assert spread([1.0, 2.0, 3.0]).mean == 2
    assert spread([1.0, 2.0, 3.0]).deviation == pytest.approx(1)
    assert degradation(1.65, 1.5) == pytest.approx(10)

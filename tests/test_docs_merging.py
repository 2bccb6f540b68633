"""The table of merges in the documentation is the registry's."""

from pathlib import Path

from isoloco_flwr.merging import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "merging.md"


def registry_table():
    rows = ["| merge | what it does | option | default | allowed | paper |", "|" + " --- |" * 6]
    for method in METHODS.values():
        options = method.options or {"": None}
        for name, option in options.items():
            cells = [f"`{method.name}`", method.summary]
            cells += [f"`{name}`", f"`{option.default!r}`", option.allowed] if option else [""] * 3
            rows.append(f"| {' | '.join([*cells, method.paper])} |")
    return "\n".join(rows)


def test_page_has_the_table_of_the_registry():
    assert registry_table() in PAGE.read_text()


def test_page_has_a_section_for_every_merge():
    headings = [line[3:] for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings[: len(METHODS)] == list(METHODS)

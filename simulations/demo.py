"""The demo: 8 virtual clients train a small Llama on real text through a real `flwr run`."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict
from rich.console import Console
from rich.table import Table

from isoloco_flwr.presets import PRESETS
from isoloco_flwr.settings import SettingsError, parse_settings
from simulations.flower import flwr_run, local_superlink

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKERS = 8
PROMPT = "The state of the Union"


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(prog="python -m simulations.demo", description=__doc__)
    parser.add_argument("--strategy", default="isoloco", choices=PRESETS, help="the preset to run")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "demo", help="folder for the results"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="run-config values to change"
    )
    arguments = parser.parse_args()
    # Ended from outside, too, the SuperLink and its children are ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    output = arguments.output.expanduser().absolute()
    console = Console(highlight=False, soft_wrap=True)
    run_config = {
        **_overrides(arguments.overrides),
        "strategy.name": arguments.strategy,
        "output-dir": str(output),
    }
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    try:
        settings = parse_settings({**flatten_dict(config), **run_config})
        settings.worker_batch_size(NUM_WORKERS)
    except SettingsError as error:
        sys.exit(str(error))
    _set_aside(output)
    output.mkdir(parents=True)
    preset = settings.strategy.preset
    console.print(
        f"[bold]{arguments.strategy}[/]: {NUM_WORKERS} virtual clients, H = {settings.inner.steps} "
        f"inner steps a round, {settings.num_server_rounds} rounds; merge {preset.merge}, outer "
        f"learning rate {preset.outer_lr:g}, momentum {preset.outer_momentum:g}"
    )
    console.print(f"Starting Flower; its log goes to {output / 'flwr.log'}")
    started = time.monotonic()
    with (
        local_superlink(output / "flwr") as superlink,
        flwr_run(superlink, ROOT, num_supernodes=NUM_WORKERS, run_config=run_config) as process,
    ):
        _keep_log(process, output / "flwr.log")
        rows = []
        for row in _follow(process, output / "metrics.jsonl"):
            rows.append(row)
            console.print(_round_line(row, settings.num_server_rounds))
    shutil.rmtree(output / "flwr")
    if not (output / "model").is_dir():
        tail = (output / "flwr.log").read_text(errors="replace").splitlines()[-25:]
        sys.exit("\n".join([*tail, f"The run failed; the whole log is {output / 'flwr.log'}"]))
    _print_results(console, rows, output, time.monotonic() - started)


def _overrides(pairs: list[str]) -> dict[str, Any]:
    for pair in pairs:
        if "=" not in pair:
            sys.exit(f"{pair!r}: allowed is KEY=VALUE, as in num-server-rounds=8")
    keys_and_values = [pair.split("=", 1) for pair in pairs]
    return {key: _value(text) for key, text in keys_and_values}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set_aside(output: Path) -> None:
    """Keep the run before this one, in place of the one before that."""
    if output.exists():
        previous = output.with_name(f"{output.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(output, previous)


def _keep_log(process: subprocess.Popen[str], path: Path) -> None:
    """Write what the run prints into a file, beside the main thread."""

    def copy() -> None:
        assert process.stdout is not None
        with path.open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()

    threading.Thread(target=copy, daemon=True).start()


def _follow(process: subprocess.Popen[str], metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield each round's line as it is written, until the run ends."""
    seen = 0
    running = True
    while running:
        running = process.poll() is None
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        for line in lines[seen:]:
            if line.endswith("\n"):
                seen += 1
                yield json.loads(line)
        time.sleep(0.2)


def _round_line(row: dict[str, Any], num_rounds: int) -> str:
    loss = "      " if row["eval-loss"] is None else f"{row['eval-loss']:6.3f}"
    if row["round"] == 0:
        return f"  before training   held-out loss {loss} nats a token"
    return (
        f"  round {row['round']:3d} of {num_rounds}   held-out loss {loss}   training loss "
        f"{row['train-loss']:6.3f}   {row['tokens'] / 1e6:5.2f} M tokens   {row['seconds']:5.1f} s"
    )


def _print_results(
    console: Console, rows: list[dict[str, Any]], output: Path, seconds: float
) -> None:
    last = rows[-1]
    table = Table(show_header=False, box=None, padding=(0, 2))
    sent = sum(row["bytes-up"] + row["bytes-down"] for row in rows)
    table.add_row("held-out loss", f"{rows[0]['eval-loss']:.3f} -> {last['eval-loss']:.3f} nats")
    table.add_row("tokens", f"{last['tokens'] / 1e6:.2f} M")
    table.add_row("replies used", str(sum(row["replies-used"] for row in rows)))
    table.add_row("replies rejected", str(sum(row["replies-rejected"] for row in rows)))
    table.add_row("bytes sent, both ways", f"{sent / 1e6:.0f} MB")
    table.add_row("merging and outer steps", f"{sum(r['aggregate-seconds'] for r in rows):.1f} s")
    table.add_row("rounds", f"{sum(row['seconds'] for row in rows):.0f} s")
    table.add_row("all, with Flower's start", f"{seconds:.0f} s")
    console.print()
    console.print(table)
    console.print(f"\n[bold]The trained model goes on from “{PROMPT}”:[/]")
    console.print(_sample(output / "model"), markup=False)
    console.print(f"\nIn {output}: metrics.jsonl, loss.png, config.json, model/")


def _sample(folder: Path) -> str:
    """Load the model as anybody would and let it write."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
    tokens = model.generate(**prompt, max_new_tokens=room, do_sample=True, temperature=0.7)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

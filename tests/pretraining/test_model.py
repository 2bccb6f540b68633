"""Models by size, the same for everybody who names the same seed."""

import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from isoloco_flwr.pretraining.model import (
    DEFAULT_CONTEXT,
    MODEL_PRESETS,
    build_model,
    context_length,
    load_tensors,
    model_tensors,
)
from isoloco_flwr.pretraining.tokenizer import END_OF_TEXT, byte_tokenizer, encode


@pytest.mark.parametrize(
    ("preset", "vocabulary", "parameters"),
    [
        ("demo", 257, 381_792),
        ("3M", 257, 2_755_392),
        ("30M", 257, 25_961_984),
        ("178M", 32_000, 177_622_016),
        ("512M", 32_000, 512_398_848),
        ("1B", 32_000, 1_100_048_384),  # TinyLlama's own count, arXiv 2401.02385
    ],
)
def test_parameter_counts(preset, vocabulary, parameters):
    with torch.device("meta"):
        model = build_model(preset, vocabulary_size=vocabulary, seed=0)
    assert model.num_parameters() == parameters
    shape = MODEL_PRESETS[preset]
    # By hand: embedding and head, then attention, MLP and two norms a layer, and the last norm.
    grouped = (shape.key_value_heads or shape.heads) / shape.heads  # of keys and values
    attention = 2 * shape.hidden**2 + 2 * int(shape.hidden**2 * grouped)
    layer = attention + 3 * shape.hidden * shape.mlp + 2 * shape.hidden
    assert parameters == 2 * vocabulary * shape.hidden + shape.layers * layer + shape.hidden


def test_the_seed_decides_the_weights_and_nothing_else_does():
    torch.manual_seed(1)
    first = build_model("demo", vocabulary_size=257, seed=3).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    torch.manual_seed(2)
    again = build_model("demo", vocabulary_size=257, seed=3).state_dict()
    other = build_model("demo", vocabulary_size=257, seed=4).state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


def test_building_a_model_leaves_the_generators_of_gpus_alone(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(5)
    assert seeds == [5]  # torch's own function reaches them, with or without a GPU
    build_model("demo", vocabulary_size=257, seed=3)
    assert seeds == [5]


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match=r"model\.preset = '179M': allowed is one of demo"):
        build_model("179M", vocabulary_size=257, seed=0)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_transformers_and_we_tokenize_alike(saved_tokenizer, text):
    if "<|endoftext|>" in text:
        return
    ids = saved_tokenizer(text)["input_ids"]
    assert ids == encode(text).tolist()
    assert saved_tokenizer.decode(ids) == text


def test_the_end_of_text_is_one_token(saved_tokenizer):
    assert saved_tokenizer.eos_token_id == END_OF_TEXT
    assert saved_tokenizer("a<|endoftext|>")["input_ids"] == [97, END_OF_TEXT]


def tied_model():
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def test_tied_weights_travel_once_and_stay_tied():
    model = tied_model()
    tensors = {name: torch.randn_like(value) for name, value in model_tensors(model).items()}
    assert set(model.state_dict()) - set(tensors) == {"lm_head.weight"}
    load_tensors(model, tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in model_tensors(model).items():
        assert torch.equal(value, tensors[name])


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_wrong_tensors_are_named_and_nothing_is_loaded(change):
    model = build_model("demo", vocabulary_size=257, seed=0)
    tensors = {name: value + 1 for name, value in model_tensors(model).items()}
    if change == "missing":
        del tensors["lm_head.weight"]
    elif change == "unknown":
        tensors["lm_head.weight.more"] = torch.zeros(1)
    else:
        tensors["lm_head.weight"] = torch.zeros(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_tensors(model, tensors)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tokens", [64, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_step_of_the_published_model_takes_less_than_6_gb_on_a_cpu(tokens):
    script = """
import resource
import sys
import torch
from torch.nn import functional as F
from isoloco_flwr.pretraining.model import build_model

torch.set_num_threads(1)
model = build_model("178M", vocabulary_size=32_000, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
batch = torch.randint(32_000, (1, int(sys.argv[1]) + 1))
before = model.lm_head.weight[0].detach().clone()
logits = model(input_ids=batch[:, :-1], use_cache=False).logits
F.cross_entropy(logits[0], batch[0, 1:]).backward()
optimizer.step()
assert not torch.equal(model.lm_head.weight[0], before)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    # A child's peak starts at what its parent has when it forks.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 6e9
    done = subprocess.run(
        [sys.executable, "-c", script, str(tokens)],
        capture_output=True,
        text=True,
        check=True,
        timeout=550,
    )
    assert 2.8e9 < int(done.stdout) * 1024 < 6e9  # weights, gradients and moments alone: 2.84 GB


def write_config(folder, **changes):
    """Write a small Llama's config.json."""
    config = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config | changes))
    return str(path)


def build(*, path="", config="", vocabulary_size=257, seed=0):
    return build_model("demo", vocabulary_size=vocabulary_size, seed=seed, path=path, config=config)


@pytest.fixture
def saved(tmp_path):
    """Save a model with tied weights in bfloat16; return it and the folder."""
    model = build(config=write_config(tmp_path, tie_word_embeddings=True)).to(torch.bfloat16)
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba", "qwen3"])
def test_any_causal_model_is_built_from_its_config_and_trains(tmp_path, kind):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "head_dim": 8}
    model = build(config=write_config(tmp_path, model_type=kind, **sizes))
    assert model.config.model_type == kind
    assert model.training
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    batch = torch.randint(257, (2, 8))
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    assert all(value.grad is not None for value in model.parameters())


def test_the_seed_decides_the_weights_of_a_config_and_nothing_else_does(tmp_path):
    config = write_config(tmp_path)
    torch.manual_seed(1)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    first, again, other = (build(config=config, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


def test_a_saved_model_goes_on_from_its_weights_in_float32(saved):
    model, folder = saved
    torch.manual_seed(1)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    loaded = build(path=str(folder), seed=5)
    assert torch.equal(torch.rand(1), drawn)
    assert loaded.training
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], value.float())


@pytest.mark.parametrize("source", ["path", "config"])
def test_tied_weights_stay_tied_from_any_source(saved, source):
    _, folder = saved
    where = folder if source == "path" else folder / "config.json"
    model = build(**{source: str(where)})
    tensors = {name: torch.randn_like(value) for name, value in model_tensors(model).items()}
    assert set(model.state_dict()) - set(tensors) == {"lm_head.weight"}
    load_tensors(model, tensors)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    assert len(list(model.parameters())) == len(tensors)


@pytest.mark.parametrize("source", ["path", "config"])
def test_a_vocabulary_that_does_not_fit_is_said_with_both_sizes(saved, source):
    _, folder = saved
    where = {source: str(folder)}
    assert build(**where, vocabulary_size=300).config.vocab_size == 300
    with pytest.raises(ValueError, match=rf"model\.{source} = .* 300 entries, .* 301 "):
        build(**where, vocabulary_size=301)


def test_a_path_and_a_config_exclude_one_another():
    with pytest.raises(ValueError, match=r"model\.path = 'a' and model\.config = 'b'"):
        build(path="a", config="b")


@pytest.mark.parametrize("source", ["path", "config"])
def test_a_place_where_nothing_is_never_asks_the_hub(source):
    with pytest.raises(ValueError, match=rf"model\.{source} = 'gpt2': there is no"):
        build(**{source: "gpt2"})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no such"},
        {"model_type": "t5"},
        {"model_type": "vit"},
        {"vocab_size": "many"},
        {"hidden_size": 17},
    ],
)
def test_a_config_of_no_causal_model_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"model\.config = '.*config\.json': not a causal"):
        build(config=write_config(tmp_path, **changes))


def test_a_broken_config_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"model\.config = .* not a valid JSON"):
        build(config=str(path))


@pytest.mark.parametrize("change", ["missing", "shape", "damaged", "no weights"])
def test_a_model_whose_weights_are_not_whole_is_refused(saved, tmp_path, change):
    # transformers would train random weights in their place, with no more than a warning.
    folder = tmp_path / "changed"
    shutil.copytree(saved[1], folder)
    file = folder / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    if change == "missing":
        del weights[name]
    elif change == "shape":
        weights[name] = torch.zeros(3, 3)
    save_file(weights, file, metadata={"format": "pt"})
    if change == "damaged":
        file.write_bytes(b"damaged")
    elif change == "no weights":
        file.unlink()
    what = name if change in ("missing", "shape") else "not a causal"
    with pytest.raises(ValueError, match=rf"model\.path = '.*changed': .*{what}"):
        build(path=str(folder))


@pytest.mark.parametrize(
    ("own", "limit", "context"),
    [
        (64, 0, 64),
        (64, 48, 48),
        (64, 4096, 64),
        (10**9, 0, DEFAULT_CONTEXT),
        (10**9, 4096, 4096),
    ],
)
def test_the_context_is_the_models_within_the_limit(tmp_path, own, limit, context):
    model = build(config=write_config(tmp_path, max_position_embeddings=own))
    assert context_length(model, limit) == context


def test_names_of_the_context_differ_and_some_models_have_none(tmp_path):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    config = write_config(tmp_path, model_type="gpt2", max_position_embeddings=40, **sizes)
    assert context_length(build(config=config)) == 40
    mamba = build(config=write_config(tmp_path, model_type="mamba", max_position_embeddings=None))
    assert context_length(mamba) == DEFAULT_CONTEXT
    assert context_length(mamba, 96) == 96


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_preset_has_its_own_context(preset):
    with torch.device("meta"):
        model = build_model(preset, vocabulary_size=257, seed=0)
    assert context_length(model) == MODEL_PRESETS[preset].context

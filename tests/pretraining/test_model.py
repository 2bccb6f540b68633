"""Models by size, the same for everybody who names the same seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from isoloco_flwr.pretraining.model import (
    MODEL_PRESETS,
    build_model,
    load_tensors,
    model_tensors,
)
from isoloco_flwr.pretraining.tokenizer import END_OF_TEXT, byte_tokenizer, encode


@pytest.mark.parametrize(
    ("preset", "vocabulary", "parameters"),
    [
        ("demo", 257, 381_792),
        ("178M", 32_000, 177_622_016),
        ("512M", 32_000, 512_398_848),
    ],
)
def test_parameter_counts(preset, vocabulary, parameters):
    with torch.device("meta"):
        model = build_model(preset, vocabulary_size=vocabulary, seed=0)
    assert model.num_parameters() == parameters
    shape = MODEL_PRESETS[preset]
    # By hand: embedding and head, then attention, MLP and two norms a layer, and the last norm.
    layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.mlp + 2 * shape.hidden
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
    with pytest.raises(ValueError, match="'179M': allowed is one of demo"):
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

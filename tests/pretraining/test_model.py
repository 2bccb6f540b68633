"""Models by size, the same for everybody who names the same seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from isoloco_flwr.pretraining.model import MODEL_PRESETS, build_model
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

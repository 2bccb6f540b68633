"""Tokenizers: text there and back whatever is in it, and one clear line where one is unfit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_sources import SPECIAL, sample_texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isoloco_flwr.pretraining.tokenizer import (
    END_OF_TEXT_NAME,
    TokenizerError,
    encode,
    load_tokenizer,
    train_bpe,
)

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Any text but lone surrogates, which UTF-8 has not."""


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(sample_texts(), 300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(bpe_folder):
    return {name: load_tokenizer(name) for name in ("bytes", str(bpe_folder))}


@given(texts=st.lists(UNICODE | st.just(SPECIAL), max_size=5))
@settings(deadline=None)
def test_any_text_comes_back_and_none_gives_the_end_of_a_text(loaded, texts):
    for tokenizer in loaded.values():
        encoded = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(tokens) for tokens in encoded] == texts
        for tokens in encoded:
            assert tokens.dtype == tokenizer.dtype == np.uint16
            assert tokenizer.end_of_text not in tokens
            assert (tokens < tokenizer.vocabulary_size).all()


def test_the_tokens_of_a_text_do_not_depend_on_its_batch(loaded):
    texts = sample_texts()
    for tokenizer in loaded.values():
        alone = [tokenizer.encode_batch([text])[0] for text in texts]
        for one, other in zip(tokenizer.encode_batch(texts), alone, strict=True):
            np.testing.assert_array_equal(one, other)


def test_bytes_are_utf8(loaded):
    assert encode("Aé").tolist() == [65, 195, 169]
    assert (loaded["bytes"].vocabulary_size, loaded["bytes"].end_of_text) == (257, 256)
    assert loaded["bytes"].pretrained("Aé")["input_ids"] == [65, 195, 169]


def test_a_trained_tokenizer_is_one_of_transformers_whose_last_entry_ends_a_text(bpe_folder):
    own, theirs = load_tokenizer(str(bpe_folder)), AutoTokenizer.from_pretrained(bpe_folder)
    assert own.vocabulary_size == len(theirs) == 300
    assert own.end_of_text == theirs.eos_token_id == 299
    text = sample_texts()[20]
    assert own.encode_batch([text])[0].tolist() == theirs(text)["input_ids"]
    assert len(own.encode_batch([text])[0]) < len(text.encode()) / 2


def test_saved_tokenizers_are_the_same_again(loaded, tmp_path):
    for number, tokenizer in enumerate(loaded.values()):
        tokenizer.save_pretrained(tmp_path / str(number))
        again = load_tokenizer(str(tmp_path / str(number)))
        assert again.vocabulary_size == tokenizer.vocabulary_size
        assert again.end_of_text == tokenizer.end_of_text
        texts = [SPECIAL, "Aé"]
        for one, other in zip(
            again.encode_batch(texts), tokenizer.encode_batch(texts), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_the_same_tokenizer_trained_again_has_the_same_identity_and_another_has_not(
    bpe_folder, tmp_path
):
    identities = []
    for number, (texts, size) in enumerate(
        [(sample_texts(), 300), (sample_texts(), 299), (["sea land"] * 9, 300)]
    ):
        train_bpe(texts, size).save_pretrained(tmp_path / str(number))
        identities.append(load_tokenizer(str(tmp_path / str(number))).identity)
    assert identities[0] == load_tokenizer(str(bpe_folder)).identity
    assert len(set(identities)) == 3


def word_tokenizer(folder, entries, **options):
    """Write a tokenizer of whole words, as somebody else's may be."""
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", **options).save_pretrained(
        folder
    )
    return str(folder)


def test_a_large_vocabulary_takes_four_bytes_a_token_and_gaps_in_it_count(tmp_path):
    entries = {"?": 0, "end": 1, "last": 70_000}
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, entries, eos_token="end"))
    assert tokenizer.vocabulary_size == 70_001
    [tokens] = tokenizer.encode_batch(["last what"])
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [70_000, 0]


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    entries = {"?": 0, "end": 1, "last": 5}
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, entries, eos_token="end"))
    smaller = dataclasses.replace(tokenizer, vocabulary_size=5)
    with pytest.raises(TokenizerError, match=r"gives the token 5, allowed are those below 5"):
        smaller.encode_batch(["what last"])


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    name = word_tokenizer(tmp_path, {"?": 0, "word": 1})
    with pytest.raises(TokenizerError, match=r"data\.tokenizer = .* no end-of-text token"):
        load_tokenizer(name)


def test_a_folder_without_a_tokenizer_or_none_at_all_is_named(tmp_path, bpe_folder, monkeypatch):
    allowed = r"allowed is bytes, the absolute path of a tokenizer's folder, or a Hugging Face name"
    monkeypatch.chdir(bpe_folder.parent)
    for name in (str(tmp_path), str(tmp_path / "nowhere"), f"./{bpe_folder.name}", ""):
        with pytest.raises(TokenizerError, match=rf"data\.tokenizer = '{name}'.*{allowed}"):
            load_tokenizer(name)


@pytest.mark.parametrize("vocabulary", [256, 0, -1])
def test_a_vocabulary_below_all_bytes_is_refused(vocabulary):
    with pytest.raises(TokenizerError, match=rf"vocabulary = {vocabulary}: .*at least 257"):
        train_bpe(["text"], vocabulary)


def test_the_smallest_vocabulary_is_the_bytes():
    tokenizer = train_bpe(["text"], 257)
    assert sorted(tokenizer.get_vocab().values()) == list(range(257))
    assert tokenizer.eos_token == END_OF_TEXT_NAME
    assert len(tokenizer("Aé")["input_ids"]) == 3

"""The byte tokenizer: every byte of UTF-8 is a token, and one more ends a text."""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["END_OF_TEXT", "VOCABULARY_SIZE", "byte_tokenizer", "encode"]

END_OF_TEXT = 256
"""Token that stands behind every document."""

VOCABULARY_SIZE = 257
"""256 bytes and the end of a text."""


def encode(text: str) -> NDArray[np.uint16]:
    """Return the tokens of a text, without an end."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the same tokenizer for `transformers`, to be saved beside a model."""
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run."""
    return byte_tokenizer()

"""Tokenizers: plain bytes, any of transformers, or a byte-level BPE trained here."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = [
    "END_OF_TEXT",
    "VOCABULARY_SIZE",
    "TextTokenizer",
    "TokenizerError",
    "byte_tokenizer",
    "encode",
    "load_tokenizer",
    "train_bpe",
]

END_OF_TEXT = 256
"""Byte tokenizer's token that stands behind every document."""

VOCABULARY_SIZE = 257
"""Byte tokenizer's entries: 256 bytes and the end of a text."""

END_OF_TEXT_NAME = "<|endoftext|>"


class TokenizerError(ValueError):
    """A tokenizer that is not there, or cannot be trained with."""


@dataclass(frozen=True)
class TextTokenizer:
    """Text to tokens and back."""

    name: str
    """As `load_tokenizer` takes it."""
    pretrained: PreTrainedTokenizerBase
    """The same for `transformers`."""
    vocabulary_size: int
    """Entries: every token is below."""
    end_of_text: int
    """Token that stands behind every document."""
    identity: str
    """Changes when the tokens of a text may."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type on disk that holds the vocabulary: uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of every text, without an end; a text never gives a special token.

        Raises
        ------
        TokenizerError
            If a token is beyond the vocabulary.
        """
        if self.name == "bytes":
            return [encode(text) for text in texts]
        if not texts:
            return []
        encoded = self.pretrained(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # of texts longer than a model's context
        )["input_ids"]
        largest = max((max(tokens) for tokens in encoded if tokens), default=0)
        if largest >= self.vocabulary_size:
            raise TokenizerError(
                f"data.tokenizer = {self.name!r} gives the token {largest}, allowed are those "
                f"below {self.vocabulary_size}, the entries of its vocabulary"
            )
        return [np.array(tokens, dtype=self.dtype) for tokens in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        text = self.pretrained.decode([int(token) for token in tokens])
        assert isinstance(text, str)
        return text

    def save_pretrained(self, folder: Path | str) -> None:
        """Write it so that `AutoTokenizer.from_pretrained` and `load_tokenizer` read it."""
        self.pretrained.save_pretrained(folder)


def encode(text: str) -> NDArray[np.uint16]:
    """Return the bytes of a text as tokens, without an end."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte tokenizer for `transformers`, to be saved beside a model."""
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    return _pretrained(_byte_level(BPE(vocab=vocabulary, merges=[]), use_regex=False))


def load_tokenizer(name: str) -> TextTokenizer:
    """Return a tokenizer.

    Parameters
    ----------
    name : str
        "bytes", the folder of a tokenizer in `save_pretrained` form (absolute or from ~), or a name
        on the Hugging Face hub.

    Raises
    ------
    TokenizerError
        If there is none, or it has no token for the end of a text.
    """
    if name == "bytes":
        return TextTokenizer(name, byte_tokenizer(), VOCABULARY_SIZE, END_OF_TEXT, "bytes")
    path = Path(name).expanduser()
    allowed = "allowed is bytes, the absolute path of a tokenizer's folder, or a Hugging Face name"
    is_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not path.exists()
    if not is_name and not (path.is_absolute() and path.is_dir()):
        raise TokenizerError(f"data.tokenizer = {name!r}: there is no such folder; {allowed}")
    try:
        pretrained = AutoTokenizer.from_pretrained(name if is_name else str(path))
    except Exception as error:  # of transformers, tokenizers, the hub, the network
        reason = shorten(str(error), 240, placeholder=" ...")
        raise TokenizerError(f"data.tokenizer = {name!r}: {allowed} ({reason})") from error
    end_of_text = pretrained.eos_token_id
    if end_of_text is None:
        raise TokenizerError(
            f"data.tokenizer = {name!r} has no end-of-text token (eos_token), which stands behind "
            "every document: allowed is a tokenizer with one"
        )
    # Some have numbers without an entry: the largest counts, not how many there are.
    size = max(pretrained.get_vocab().values()) + 1
    return TextTokenizer(name, pretrained, size, end_of_text, _identity(pretrained))


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; its last entry is the end of a text.

    Parameters
    ----------
    texts : Iterable[str]
        What it is trained on.
    vocabulary_size : int
        Entries; fewer come out where the texts have not as many pairs to merge.

    Raises
    ------
    TokenizerError
        If not even every byte and the end of a text had an entry.
    """
    if vocabulary_size < VOCABULARY_SIZE:
        raise TokenizerError(
            f"vocabulary = {vocabulary_size}: allowed is at least {VOCABULARY_SIZE}, every byte "
            "and the end of a text"
        )
    tokenizer = _byte_level(BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - 1,
        initial_alphabet=sorted(bytes_to_unicode().values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _pretrained(tokenizer)


def _byte_level(model: BPE, *, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pretrained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT_NAME, clean_up_tokenization_spaces=False
    )


def _identity(pretrained: PreTrainedTokenizerBase) -> str:
    """Return a checksum of all that decides the tokens of a text."""
    state = {
        "vocabulary": sorted(pretrained.get_vocab().items()),
        "end": pretrained.eos_token_id,
        "class": type(pretrained).__name__,
    }
    if isinstance(pretrained, PreTrainedTokenizerFast):
        state["backend"] = pretrained.backend_tokenizer.to_str()
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()

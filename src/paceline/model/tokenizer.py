"""Load tokenizers, compare vocabularies, and find the bytes of single tokens; imports no torch."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.stages import stage
from paceline.errors import ModelLoadError
from paceline.model.gguf import corrected_tokenizer, gguf_file, read_gguf
from paceline.model.names import first_line, model_path

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder
    from transformers import PreTrainedTokenizerFast

    Tokenizer = PreTrainedTokenizerFast
else:
    Tokenizer = object  # for annotations only, so that transformers need not be imported

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")  # numbers as Rust parses them
_BEFORE, _AFTER = "0", "1"  # tokens around the one whose bytes are wanted


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder. Raises ModelLoadError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = model_path(name)
    gguf = gguf_file(path)
    if gguf is not None:
        return _load_gguf(gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except BaseException as error:  # the tokenizers library raises nothing more precise
        _reraise_foreign(error)
        # That message goes on with a long list of ways to create a tokenizer.
        generic = "instantiate the backend tokenizer" in str(error)
        raise _absent(name, "" if generic else f": {first_line(error)}") from None
    if len(tokenizer) <= len({*tokenizer.all_special_tokens}):  # Qwen's class needs no files for it
        raise _absent(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer of {name} is not a fast one (tokenizer.json); "
            "convert it with transformers' convert_slow_tokenizer and save it there"
        )
    return tokenizer


def _absent(name: str, why: str = "") -> ModelLoadError:
    return ModelLoadError(f"no tokenizer in {name}{why}; put tokenizer.json beside the weights")


def _reraise_foreign(error: BaseException) -> None:
    """Raise an error again that is neither an Exception nor a panic of Rust code, such as
    KeyboardInterrupt. Panics do not derive from Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _load_gguf(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in a GGUF file, with its chat template."""
    from transformers import AutoTokenizer

    file = read_gguf(path)
    try:
        with stage(f"reading the tokenizer of {path.name}"):
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except BaseException as error:  # damaged files raise all kinds of errors
        _reraise_foreign(error)
        raise ModelLoadError(
            f"the tokenizer of {path} cannot be read: {first_line(error)}; another file of the "
            "same model may hold one that can"
        ) from None
    tokenizer._tokenizer = corrected_tokenizer(tokenizer.backend_tokenizer, file)
    end = file.fields.get("tokenizer.ggml.eos_token_id")
    if end is not None and 0 <= int(end) < len(tokenizer):  # transformers 5.17 takes <s> instead
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end))
    return tokenizer


def differences(
    tokenizer: PreTrainedTokenizerFast, draft_tokenizer: PreTrainedTokenizerFast
) -> str:
    """A text with the number of vocabulary entries that differ, and the first three; "" if none."""
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    theirs = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if not differing:
        return ""
    shown = "; ".join(
        f"id {i}: target {ours.get(i)!r}, draft {theirs.get(i)!r}" for i in differing[:3]
    )
    return f"{len(differing)} of {len(ours)} vocabulary entries ({shown})"


class TokenSpeller:
    """Finds the bytes of tokens, which are given by their names in the vocabulary. A token may be a
    part of a character, so names of byte-level and byte-fallback tokenizers are converted here;
    others are decoded."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decode = " ".join if decoder is None else decoder.decode
        self._byte_level = self._decode(["Ġ"]) == " "
        self._byte_fallback = self._decode(["<0x41>"]) == "A"
        # What a decoder makes of the token after: some put a space before it.
        self._rest = self._decode([_BEFORE, _AFTER]).removeprefix(_BEFORE)

    def byte(self, name: str) -> int | None:
        """The byte of a byte-fallback token such as ``<0xE4>``; None for any other token."""
        match = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        return None if match is None else int(match[1], 16)

    def spell(self, name: str) -> bytes:
        """The bytes of a token in the middle of a text."""
        byte = self.byte(name)
        if byte is not None:
            return bytes([byte])
        if self._byte_level:
            alphabet = _byte_level_alphabet()
            if not alphabet.keys() >= {*name}:  # outside the byte alphabet: a special token
                return name.encode()
            return bytes(map(alphabet.__getitem__, name))
        text = self._decode([_BEFORE, name, _AFTER])
        return text.removeprefix(_BEFORE).removesuffix(self._rest).encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each character of GPT-2's byte-level alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}

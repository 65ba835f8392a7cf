"""The bytes that a single token stands for, as a tokenizer's decoder writes it inside a text."""

from __future__ import annotations

import re

from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")  # as Rust reads numbers
_BEFORE, _AFTER = "0", "1"  # tokens around the one that is spelt


class TokenSpeller:
    """Spells the tokens of one decoder, which are given by their names in the vocabulary.

    A decoder gives text, and a token may be a part of a character: what the two kinds that write
    bytes (byte-level ones, and byte fallback) make of a token is known here, the rest is decoded.
    """

    def __init__(self, decoder: Decoder | None) -> None:
        self._decode = " ".join if decoder is None else decoder.decode
        self._byte_level = self._decode(["Ġ"]) == " "
        self._byte_fallback = self._decode(["<0x41>"]) == "A"
        # Some decoders put a space before the token that follows.
        self._rest = self._decode([_BEFORE, _AFTER]).removeprefix(_BEFORE)

    def byte(self, name: str) -> int | None:
        """The byte that a token of byte fallback (``<0xE4>``) is; None for any other token."""
        match = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        return None if match is None else int(match[1], 16)

    def spell(self, name: str) -> bytes:
        """What a token stands for in the middle of a text."""
        byte = self.byte(name)
        if byte is not None:
            return bytes([byte])
        if self._byte_level:
            # A token with a character that stands for no byte is taken as it is.
            strange = any(character not in _BYTES for character in name)
            return name.encode() if strange else bytes(map(_BYTES.__getitem__, name))
        text = self._decode([_BEFORE, name, _AFTER])
        return text.removeprefix(_BEFORE).removesuffix(self._rest).encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable characters are themselves, the others follow U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()

"""The parts of tokenizers' decoders, one token at a time.

``tokenizers`` decodes a list of tokens as a whole; its own ``DecodeStream`` decodes windows of the
list and hopes that they join, which fails for bytes that are no UTF-8. Here each part of a decoder
is a stage that takes one token and gives what no later token can change; the rest comes with
``flush``. What all calls give together is what the library's part gives for the list, so a
chain of stages gives what the chain of parts does.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from copy import copy
from typing import Any

from tokenizers.decoders import Decoder, Fuse

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")  # as Rust reads numbers
_utf8 = codecs.getincrementaldecoder("utf-8")


class DecoderStage:
    """One part of a decoder in the middle of one text.

    One that no text has been fed to is the part itself: ``begun`` is a stage of a new text.
    """

    def begun(self) -> DecoderStage:
        return copy(self)

    def spell(self, token: str) -> str | bytes:
        """A single token in the middle of a text; bytes are final."""
        return token

    def feed(self, token: str) -> list[str]:
        """Tokens for the next stage, or pieces of the one token that everything has become."""
        text = self.spell(token)
        assert isinstance(text, str)
        return [text]

    def flush(self) -> list[str]:
        """The rest, once no token will follow."""
        return []

    def drop_unfinished(self) -> None:
        """The text ends with its last whole character."""


class Single(DecoderStage):
    """Turns every token into one, whatever stands around it.

    ``positional``: the first token of a text is another matter (Metaspace, WordPiece).
    """

    def __init__(self, decoder: Decoder, positional: bool = False) -> None:
        self._decoder, self._positional, self._first = decoder, positional, positional
        self._known: dict[str, str] = {}  # shared by all texts

    def feed(self, token: str) -> list[str]:
        if self._first:
            self._first = False
            return [self._decoder.decode([token])]
        return [self.spell(token)]

    def spell(self, token: str) -> str:
        text = self._known.get(token)
        if text is None:
            before = ["a"] if self._positional else []
            text = self._decoder.decode([*before, token])
            text = self._known[token] = text[len(self._decoder.decode(before)) :]
        return text


class Strip(DecoderStage):
    """Takes up to ``start`` and ``stop`` characters ``content`` off the ends of every token."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop

    def spell(self, token: str) -> str:
        for _ in range(self._start):
            token = token.removeprefix(self._content)
        for _ in range(self._stop):
            token = token.removesuffix(self._content)
        return token


class Spaces(DecoderStage):
    """Tokenizers without a decoder put a space between tokens."""

    _lead = ""

    def feed(self, token: str) -> list[str]:
        lead, self._lead = self._lead, " "
        return [lead + token]

    def spell(self, token: str) -> str:
        return " " + token


class WordEnd(DecoderStage):
    """BPEDecoder: the end of a word is a space, unless it is the end of the text."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def feed(self, token: str) -> list[str]:
        last, self._last = self._last, token
        return [] if last is None else [self.spell(last)]

    def flush(self) -> list[str]:
        return [] if self._last is None else [self._last.replace(self._suffix, "")]

    def spell(self, token: str) -> str:
        return token.replace(self._suffix, " ")


class ByteRun(DecoderStage):
    """Byte fallback: tokens ``<0xE4>`` are bytes. A run of them is text, or if it is no UTF-8
    every byte of it is U+FFFD: so a run waits for its end, or for the first byte that cannot be.

    ``length`` bytes wait; as far as they are whole characters they are ``text``. ``fresh`` is the
    text that the last byte completed in a run that may yet turn out to be none.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._utf8 = _utf8("strict")
        self.text = self.fresh = ""
        self.length = 0
        self._broken = False

    def begun(self) -> ByteRun:
        return ByteRun()

    def feed(self, token: str) -> list[str]:
        self.fresh = ""
        byte = self.spell(token)
        if isinstance(byte, str):
            return [*self.flush(), byte]
        if self._broken:
            return [REPLACEMENT]
        self.length += 1
        try:
            self.fresh = self._utf8.decode(byte)
        except UnicodeDecodeError:
            lost = [REPLACEMENT] * self.length
            self.flush()
            self._broken = True
            return lost
        self.text += self.fresh
        return []

    def drop_unfinished(self) -> None:
        self._utf8.reset()

    def flush(self) -> list[str]:
        unfinished, count, run = self._utf8.getstate()[0], self.length, self.text
        self._clear()
        if unfinished:
            return [REPLACEMENT] * count
        return [run] if count else []

    def spell(self, token: str) -> str | bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return token if byte is None else bytes([int(byte[1], 16)])


class ByteLevel(DecoderStage):
    """Characters stand for bytes; the text is what the bytes of all tokens are as UTF-8."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}  # shared by all texts
        self._utf8 = _utf8("replace")

    def begun(self) -> ByteLevel:
        stage = copy(self)
        stage._utf8 = _utf8("replace")
        return stage

    def spell(self, token: str) -> bytes:
        spelled = self._known.get(token)
        if spelled is None:
            # A token with a character that stands for no byte is taken as it is.
            strange = any(character not in _BYTES for character in token)
            spelled = token.encode() if strange else bytes(map(_BYTES.__getitem__, token))
            self._known[token] = spelled
        return spelled

    def drop_unfinished(self) -> None:
        self._utf8.reset()

    def feed(self, token: str) -> list[str]:
        return [self._utf8.decode(self.spell(token))]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable characters are themselves, the others follow U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class DropBeginning(DecoderStage):
    """Drops what a text has in common with ``beginning``, from its first character on: Strip where
    all tokens have become one."""

    def __init__(self, beginning: str) -> None:
        self._left = beginning

    def feed(self, token: str) -> list[str]:
        if not self._left:
            return [token]
        same = 0
        while same < min(len(token), len(self._left)) and token[same] == self._left[same]:
            same += 1
        self._left = self._left[same:] if same == len(token) else ""
        return [token[same:]]


class Whole(DecoderStage):
    """A decoder that is not known here, or that can be told at the end only: nothing comes before.

    ``joined``: the tokens are pieces of one.
    """

    def __init__(self, decoder: Decoder, joined: bool) -> None:
        self._decoder, self._joined = decoder, joined
        self._tokens: list[str] = []

    def begun(self) -> Whole:
        return Whole(self._decoder, self._joined)

    def feed(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def flush(self) -> list[str]:
        tokens = ["".join(self._tokens)] if self._joined else self._tokens
        return [self._decoder.decode(tokens)] if self._tokens else []

    def spell(self, token: str) -> str:
        return self._decoder.decode([token])


def parts_of(decoder: Decoder | None) -> list[DecoderStage]:
    """The parts of a tokenizer's decoder, in their order."""
    if decoder is None:
        return [Spaces()]
    try:
        # tokenizers has no accessors; the state that it pickles is its JSON.
        specs = _flat(json.loads(decoder.__getstate__()))
    except Exception:  # a decoder written in Python
        return [Whole(decoder, joined=False)]
    parts: list[DecoderStage] = []
    joined = False
    for index, spec in enumerate(specs):
        kind = spec["type"]
        if kind == "Fuse":
            joined = True
            continue
        part = _part(spec, joined)
        if part is None:
            rest = {"type": "Sequence", "decoders": specs[index:]}
            return [*parts, Whole(_library(rest), joined)]
        parts.append(part)
        joined = joined or kind == "ByteLevel"
    return parts


def bytes_of(parts: Sequence[DecoderStage], token: str) -> bytes:
    """What a token stands for in the middle of a text."""
    text: str | bytes = token
    for part in parts:
        if isinstance(text, str):
            text = part.spell(text)
    return text.encode() if isinstance(text, str) else text


def _flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [part for inner in spec["decoders"] for part in _flat(inner)]


def _library(spec: dict[str, Any]) -> Decoder:
    decoder = Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder


def _part(spec: dict[str, Any], joined: bool) -> DecoderStage | None:
    """``joined``: it follows where all tokens have become one."""
    match spec["type"]:
        case "Strip" if joined:
            return None if spec["stop"] else DropBeginning(spec["content"] * spec["start"])
        case _ if joined:
            return None
        case "Replace":
            return Single(_library(spec))
        case "Metaspace" | "WordPiece":
            return Single(_library(spec), positional=True)
        case "Strip":
            return Strip(spec["content"], spec["start"], spec["stop"])
        case "BPEDecoder":
            return WordEnd(spec["suffix"])
        case "ByteFallback":
            return ByteRun()
        case "ByteLevel":
            return ByteLevel()
    return None

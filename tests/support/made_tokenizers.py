"""Small tokenizers with every kind of decoder, and hostile lists of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from embedded_target import train_tokenizer
from support.tiny_models import SENTENCES

TOKENIZER = train_tokenizer(SENTENCES, 320)


def tokenizer(vocabulary: Sequence[str], decoder: Any) -> PreTrainedTokenizerFast:
    """Of a vocabulary as it is written; text is not meant to be encoded with it."""
    names = ["<s>", "</s>", *dict.fromkeys(vocabulary)]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<s>"))
    if decoder is not None:
        core.decoder = decoder
    core.add_special_tokens(["<s>", "</s>"])
    core.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("größer x")])
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "▁",
    "▁▁",
    "▁world",
    "world",
    "x",
    "▁x",
    "é",
    "你",
    "🙂",
    "\ufffd",
    "a▁b",
    "<0x+F>",
    "<0xG0>",
]
LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
PHI = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
ODD = decoders.Sequence(
    [
        decoders.Strip("x", 0, 1),
        decoders.Replace(Regex("[ab]+"), "é"),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace("é", "ab"),
    ]
)
ALPHABET = [chr(i) for i in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
WORDS = ["un", "##able", "##s", "world", ".", "!", "'", "n't", "do", "not", "é", "##🙂", "##"]
CLOSED = ["wor", "ld</w>", "x</w>", "y", "</w>", "é</w>"]
KINDS = {
    "byte level": tokenizer([*ALPHABET, "Ġworld", "ä½", "ł", "Ġ", "ĠðŁ"], decoders.ByteLevel()),
    "llama": tokenizer(BYTES + PIECES, LLAMA),
    "gemma": tokenizer(BYTES + PIECES, GEMMA),
    "word piece": tokenizer(WORDS, decoders.WordPiece("##", cleanup=True)),
    "metaspace": tokenizer(PIECES, decoders.Metaspace()),
    "bytes, metaspace": tokenizer(BYTES + PIECES, PHI),
    "suffixes": tokenizer(CLOSED, decoders.BPEDecoder("</w>")),
    "speech": tokenizer(CLOSED, decoders.CTC()),
    "none": tokenizer(WORDS, None),
    "odd": tokenizer(BYTES + PIECES, ODD),
    "trained": TOKENIZER,
}


def tokens_of(kind: str, most: int = 24) -> st.SearchStrategy[list[int]]:
    """Mostly bytes where there are bytes: those of characters, cut and torn."""
    width = len(KINDS[kind])
    anything = st.lists(st.integers(0, width + 1), max_size=most)
    vocabulary = KINDS[kind].get_vocab()
    if BYTES[0] not in vocabulary:
        return anything
    text = st.text(st.sampled_from("\n é你🙂\u0301"), max_size=4).map(str.encode)
    run = st.one_of(text, st.binary(max_size=3), text.map(lambda raw: raw[:-1]))
    spelt = run.map(lambda raw: [vocabulary[BYTES[byte]] for byte in raw])
    few = st.lists(st.integers(0, width + 1), max_size=2)
    return st.lists(st.one_of(spelt, few), max_size=5).map(lambda parts: list(chain(*parts)))


def decode(kind: str, ids: Sequence[int], skip: bool = True) -> str:
    text: str = KINDS[kind].backend_tokenizer.decode(list(ids), skip_special_tokens=skip)
    return text

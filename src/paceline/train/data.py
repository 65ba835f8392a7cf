"""Reading JSONL(.gz) corpora into packed token streams, one stream a file.

A record is ``{"text": ..., "license": ...}``; turns that start with ``User: `` or
``Assistant: `` and are parted by a blank line are put into the tokenizer's chat format.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from paceline.errors import DataError
from paceline.train.tokenizer import END_OF_TEXT, END_OF_TURN, ROLE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TURN = re.compile(r"(?:\A|\n\n)(User|Assistant): ")


@dataclass(frozen=True)
class Source:
    """One corpus file and its share of the training tokens."""

    path: Path
    weight: float

    @property
    def name(self) -> str:
        return self.path.name.split(".")[0]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """``FILE`` or ``FILE=WEIGHT``; the weight is relative, 1 when left out."""
        path, _, weight = spec.partition("=")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            raise DataError(
                f"--data {spec!r}: {weight!r} is not a number; use FILE=WEIGHT"
            ) from None
        if not Path(path).is_file():
            raise DataError(f"data file {path} does not exist; give JSONL or JSONL.gz files")
        if not value > 0:
            raise DataError(f"--data {spec!r}: the weight must be above 0")
        return cls(Path(path), value)


def read_records(path: Path, exclude_licenses: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Records of a JSONL(.gz) file, without those whose licence contains an excluded string."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    text = record["text"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    raise DataError(
                        f"{path}, line {number}: not a JSON object with a 'text' field"
                    ) from None
                licence = str(record.get("license", ""))
                if text and not any(word in licence for word in exclude_licenses):
                    yield record
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def render(text: str) -> str:
    """A document as the model sees it, without the leading separator.

    Conversations become ``<|user|>question<|end|><|assistant|>answer<|end|>``.
    """
    if not text.startswith(("User: ", "Assistant: ")):
        return text
    pieces = _TURN.split(text)  # ['', role, content, role, content, ...]
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return "".join(f"{ROLE_TOKENS[role.lower()]}{content}{END_OF_TURN}" for role, content in turns)


def turns_of(text: str) -> list[dict[str, str]]:
    """The messages of a conversation, as chat templates take them; [] for other text."""
    if not text.startswith(("User: ", "Assistant: ")):
        return []
    pieces = _TURN.split(text)
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": role.lower(), "content": content} for role, content in turns]


def has_our_roles(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether conversations are written with the tokens of ``render``."""
    return set(ROLE_TOKENS.values()) <= set(tokenizer.get_vocab())


def render_for(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """``render`` for any model: in its own chat format, plain where it has none."""
    if has_our_roles(tokenizer):
        return render(text)
    turns = turns_of(text)
    if not turns or not tokenizer.chat_template:
        return text
    try:
        written = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except TemplateError:  # a template may refuse, say, an opening by the assistant
        return text
    return written.removeprefix(tokenizer.bos_token or "")


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The id that stands before every document: the end-of-text token of our tokenizers, else
    the model's first token; None if it has neither that nor an end token."""
    own = tokenizer.get_vocab().get(END_OF_TEXT) if has_our_roles(tokenizer) else None
    for candidate in (own, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return None


def encode(
    path: Path, tokenizer: PreTrainedTokenizerFast, exclude_licenses: Sequence[str] = ()
) -> np.ndarray:
    """All documents of a file as one stream of ids [n], each preceded by the separator."""
    separator = separator_of(tokenizer)
    before = [] if separator is None else [separator]
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    backend = tokenizer.backend_tokenizer
    parts: list[np.ndarray] = []
    records = read_records(path, exclude_licenses)
    texts = [render_for(record["text"], tokenizer) for record in records]
    for start in range(0, len(texts), 512):
        batch = backend.encode_batch(texts[start : start + 512], add_special_tokens=False)
        parts.extend(np.array([*before, *item.ids], dtype=dtype) for item in batch)
    if not parts:
        raise DataError(
            f"{path} has no usable records (after leaving out {list(exclude_licenses)})"
        )
    return np.concatenate(parts)


@dataclass(frozen=True)
class Stream:
    """All documents of one file, one after the other."""

    name: str  # of the file
    ids: np.ndarray  # uint16 or uint32 [n]
    learn: np.ndarray  # bool [n]: what a draft shall learn to say
    starts: np.ndarray  # int64 [documents]

    def fits(self, vocab_size: int) -> bool:
        """Whether this can be what was saved: ids of the vocabulary, documents in order."""
        starts = self.starts
        return bool(
            self.ids.ndim == 1
            and self.ids.dtype.kind == "u"
            and self.ids.shape == self.learn.shape
            and len(starts)
            and int(self.ids.max()) < vocab_size
            and int(starts[0]) == 0
            and (np.diff(starts) > 0).all()
            and int(starts[-1]) < len(self.ids)
        )


def encode_stream(path, tokenizer, exclude_licenses=(), loss_on="assistant"):
    ids, learn, starts = [], [], [0]
    for line in open(path):
        r = json.loads(line)
        ids += r["ids"]
        learn += [loss_on == "all" or i >= r["prompt"] for i in range(len(r["ids"]))]
        starts.append(len(ids))
    return Stream(path.name, np.array(ids, dtype=np.uint16), np.array(learn), np.array(starts[:-1]))


class Mixture:
    """Random windows from weighted token streams; batch n depends only on (seed, n)."""

    def __init__(self, streams: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> None:
        self.streams = list(streams)
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self.seed = seed

    def batch(self, step: int, batch_size: int, seq_len: int) -> np.ndarray:
        """int64 [batch_size, seq_len + 1]: inputs and, shifted by one, their targets."""
        for stream in self.streams:
            if len(stream) <= seq_len + 1:
                raise DataError(f"a data file has only {len(stream)} tokens; needed {seq_len + 2}")
        rng = np.random.default_rng((self.seed, step))
        choice = rng.choice(len(self.streams), size=batch_size, p=self.weights)
        rows = []
        for index in choice:
            stream = self.streams[index]
            start = int(rng.integers(0, len(stream) - seq_len - 1))
            rows.append(stream[start : start + seq_len + 1])
        return np.stack(rows).astype(np.int64)

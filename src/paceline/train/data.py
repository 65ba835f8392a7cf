"""Data files as streams of token ids, one a file, with a mask of what is to be learnt.

A record holds ``messages``, ``conversations`` or ``turns``, which the target's chat template
writes; ``text``, where turns that start with ``User: `` or ``Assistant: `` and are parted by a
blank line are a conversation, too; or ``ids``, as ``paceline train sample`` writes them, of which
the first ``prompt`` were given.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.core.params import is_unicode
from paceline.core.stages import Stage, stage, warn
from paceline.errors import ConfigError, DataError
from paceline.files import telling, write_aside
from paceline.files.ownership import claim, is_claimed
from paceline.train.chat import ChatWriter, conversation_of, has_our_roles
from paceline.train.records import FORMS, Refusals, RefusedError, numbered_records
from paceline.train.records import Source as Source
from paceline.train.records import read_records as read_records
from paceline.train.tokenizer import END_OF_TEXT

LOSS_ON = ("assistant", "all")
_CHUNK = 256  # records that are tokenised at once


@dataclass(frozen=True)
class Stream:
    """All documents of one file, one after the other, each begun by the separator."""

    name: str  # of the file
    ids: np.ndarray  # uint16 or uint32 [n]
    learn: np.ndarray  # bool [n]: the tokens to be learnt, which is to predict them
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


@dataclass(frozen=True)
class _Document:
    """Text with the characters to be learnt (None: all of it), or ids after a prompt."""

    text: str = ""
    spans: list[tuple[int, int]] | None = None
    ids: np.ndarray | None = None
    prompt: int = 0


def separator_of(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The id that stands before every document: the end-of-text token of our tokenizers, else
    the model's first token; None if it has neither that nor an end token."""
    end_token = (
        tokenizer.backend_tokenizer.token_to_id(END_OF_TEXT) if has_our_roles(tokenizer) else None
    )
    for candidate in (end_token, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return None


def encode_stream(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    exclude_licenses: Sequence[str] = (),
    loss_on: str = "assistant",
) -> Stream:
    """All documents of a file, and which of their tokens are to be learnt.

    With ``loss_on`` "assistant" these are, of a conversation, the assistant's with the end token
    of each answer; of ids those after the prompt; of other text all. Lines that cannot be used are
    named in one line. Raises DataError if none can.
    """
    if loss_on not in LOSS_ON:
        raise ConfigError(f"--loss-on is {loss_on!r}; use one of {', '.join(LOSS_ON)}")
    packer = _Packer(tokenizer)
    refused = Refusals(path)
    parts: list[Stream] = []
    tokens = documents = 0
    with stage(f"tokenising {path.name}", total=_size(path), unit="B") as doing:
        read = _documents(path, packer, exclude_licenses, loss_on, refused, doing)
        while chunk := list(islice(read, _CHUNK)):
            parts.append(packer.pack(chunk, tokens))
            tokens += len(parts[-1].ids)
            documents += len(chunk)
            doing.advance(0, f"{documents:,} records, {tokens:,} tokens")
    if not tokens:
        why = f": {refused.named}" if refused.count else ""
        raise DataError(
            f"{path} has no usable records (after leaving out {list(exclude_licenses)}){why}"
        )
    refused.report(documents)
    if packer.writer.searched:
        warn(
            f"{path}: the chat template rewrites earlier turns; {packer.writer.searched:,} answers "
            "were found by their words"
        )
    return _joined(path.name, parts)


def _is_stream(file: Path) -> bool:
    return is_claimed(file.parent) or set(np.load(file).files) == {"name", "ids", "learn", "starts"}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _documents(
    path: Path,
    packer: _Packer,
    exclude_licenses: Sequence[str],
    loss_on: str,
    refused: Refusals,
    doing: Stage,
) -> Iterator[_Document]:
    for line, record in numbered_records(path, exclude_licenses, refused, doing.advance):
        try:
            yield packer.document(record, loss_on)
        except RefusedError as why:
            refused.add(line, str(why))


def _joined(name: str, parts: list[Stream]) -> Stream:
    return Stream(
        name,
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.learn for part in parts]),
        np.concatenate([part.starts for part in parts]),
    )


class _Packer:
    """Turns records into documents, and these into token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.writer = ChatWriter(tokenizer)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer's file may ask for cutting and padding, which are no part of a corpus.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._separator = separator_of(tokenizer)
        self._vocab_size = len(tokenizer)
        self._dtype = np.uint16 if self._vocab_size <= 1 << 16 else np.uint32
        # A separator ends the plain text before it, so it is learnt as well; None: there is none.
        self._after_plain: bool | None = None
        self._compared = False

    def document(self, record: dict[str, Any], loss_on: str) -> _Document:
        """Raises RefusedError; DataError if ids are those of another tokenizer."""
        whole = loss_on == "all"
        if record.get("ids") is not None:
            return self._given(record, whole)
        talk = conversation_of(record)
        if talk is None:
            return _checked(_Document(record["text"]))
        try:
            text, spans = self.writer.write(talk)
        except RefusedError:
            if any(record.get(name) is not None for name in FORMS[1:-1]):
                raise
            return _checked(_Document(record["text"]))  # as text it can still be learnt
        if not whole and not any(start < end for start, end in spans):
            raise RefusedError("its assistant says nothing (--loss-on all learns the rest)")
        return _checked(_Document(text, None if whole else spans))

    def _given(self, record: dict[str, Any], whole: bool) -> _Document:
        try:
            ids = np.asarray(record["ids"])
        except (ValueError, OverflowError):
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RefusedError("its ids are not a list of whole numbers")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise RefusedError(f"it has ids outside the vocabulary (0 to {self._vocab_size - 1})")
        prompt = record.get("prompt", 0)
        if not isinstance(prompt, int) or not 0 <= prompt < len(ids):
            raise RefusedError(f"its prompt is {prompt!r}, but it must be fewer tokens than ids")
        if not self._compared and isinstance(record.get("text"), str):
            self._compared = True
            if self._tokenizer.decode(ids.tolist()) != record["text"]:
                raise DataError(
                    "the ids of a data file are not this model's: its tokenizer reads another text "
                    "from them; let this model write its own (paceline train sample)"
                )
        return _Document(ids=ids, prompt=0 if whole else prompt)

    def pack(self, documents: Sequence[_Document], before: int) -> Stream:
        """Documents as a stream that begins ``before`` tokens after the file's first."""
        texts = [item.text for item in documents if item.ids is None]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        rows, learnt, starts = [], [], []
        for item in documents:
            plain = item.spans is None and not item.prompt
            if item.ids is not None:
                ids = item.ids.astype(self._dtype)
                learn = np.arange(len(ids)) >= item.prompt
            else:
                encoding = next(encodings)
                ids = np.array(encoding.ids, dtype=self._dtype)
                offsets = [] if item.spans is None else encoding.offsets
                learn = _learnt(offsets, item.spans, len(ids))
            if self._separator is not None:
                if not len(ids) or ids[0] != self._separator:
                    ids = np.concatenate([np.array([self._separator], self._dtype), ids])
                    learn = np.concatenate([[True], learn])
                learn[0] = plain if self._after_plain is None else self._after_plain
            self._after_plain = plain
            if len(ids):
                starts.append(before)
                before += len(ids)
                rows.append(ids)
                learnt.append(learn)
        if not rows:
            return Stream(
                "", np.zeros(0, self._dtype), np.zeros(0, np.bool_), np.zeros(0, np.int64)
            )
        return Stream("", np.concatenate(rows), np.concatenate(learnt), np.array(starts))


def _checked(document: _Document) -> _Document:
    if not isinstance(document.text, str):
        raise RefusedError("its text is no text")
    if not is_unicode(document.text):
        raise RefusedError("it has half a surrogate pair, which is no character")
    return document


def _learnt(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]] | None, count: int
) -> np.ndarray:
    """Which of ``count`` tokens begin in one of the spans; all if there are none given."""
    if spans is None:
        return np.ones(count, dtype=np.bool_)
    learn = np.zeros(count, dtype=np.bool_)
    if count:
        # A token that begins before an answer holds the end of its prompt: no decoding meets it.
        first = np.array(offsets)[:, 0]
        for start, end in spans:
            learn |= (first >= start) & (first < end)
    return learn


class Mixture:
    """Random windows from weighted token streams; batch n depends only on (seed, n)."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float], seed: int) -> None:
        self.streams = list(streams)
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self.seed = seed

    def batch(self, step: int, batch_size: int, seq_len: int) -> np.ndarray:
        """int64 [batch_size, seq_len + 1]: inputs and, shifted by one, their targets."""
        return self.windows(step, batch_size, seq_len)[0]

    def windows(self, step: int, batch_size: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a batch and, bool of the same shape, which of them are to be learnt."""
        ids, learn = [], []
        for index, start in self._places(step, batch_size, seq_len):
            part = slice(start, start + seq_len + 1)
            ids.append(self.streams[index].ids[part])
            learn.append(self.streams[index].learn[part])
        return np.stack(ids).astype(np.int64), np.stack(learn)

    def _places(self, step: int, batch_size: int, seq_len: int) -> list[tuple[int, int]]:
        """Stream and first token of each window."""
        for stream in self.streams:
            if len(stream.ids) <= seq_len + 1:
                raise DataError(
                    f"{stream.name} has only {len(stream.ids)} tokens; needed {seq_len + 2}"
                )
        rng = np.random.default_rng((self.seed, step))
        choice = rng.choice(len(self.streams), size=batch_size, p=self.weights)
        lengths = [len(stream.ids) - seq_len - 1 for stream in self.streams]
        return [(int(index), int(rng.integers(0, lengths[index]))) for index in choice]


@dataclass
class TokenStreams:
    """Streams of a run's files, as ``encode_stream`` makes them: made once, kept below ``folder``
    for when it is resumed."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    exclude_licenses: Sequence[str]
    loss_on: str
    _found: set[Path] = field(default_factory=set)  # files that were read, whole

    def file(self, source: Source) -> Path:
        """Where the stream of a file is kept; files of one name may lie in different folders."""
        digest = zlib.crc32(str(source.path.resolve()).encode())
        return self.folder / f"{source.path.name}.{digest:08x}.npz"

    def read(self, source: Source) -> Stream:
        """The kept stream, made anew if there is none or it is damaged. Raises DataError."""
        file = self.file(source)
        try:
            with np.load(file) as saved:
                stream = Stream(str(saved["name"]), saved["ids"], saved["learn"], saved["starts"])
            if stream.fits(len(self.tokenizer)):
                self._found.add(file)
                return stream
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, BadZipFile):
            pass
        return encode_stream(source.path, self.tokenizer, self.exclude_licenses, self.loss_on)

    def keep(self, source: Source, stream: Stream) -> None:
        """Save a stream for a resumed run, unless it was read from there. Raises WriteError."""
        what, file = "the token stream", self.file(source)
        if file in self._found:
            return
        with telling(what, file):
            claim(file.parent)
        with write_aside(file, what, _is_stream, durable=False) as sink:
            np.savez(
                sink,
                name=np.array(stream.name),
                ids=stream.ids,
                learn=stream.learn,
                starts=stream.starts,
            )

"""Data files as streams of token ids, one a file, with a mask of what is to be learnt, and pieces
of their documents in batches.

A record holds ``messages``, ``conversations`` or ``turns``, which the target's chat template
writes; ``text``, perhaps in turns (``turns_of``); or ``ids``, of which the first ``prompt`` were
given. Drafts are trained on documents from their first token, in batches of like length: in a
window from the middle of a text the target has not read what stands before, so its features are
none that decoding meets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from paceline.core.stages import stage, warn
from paceline.errors import DataError
from paceline.files import write_cached
from paceline.train.chat import ChatWriter, conversation_of
from paceline.train.records import FORMS, Records, RefusedError, Source, unicode_text

_CHUNK = 256  # records that are tokenised at once


@dataclass(frozen=True)
class Stream:
    """All documents of one file, one after the other, each begun by the separator."""

    name: str  # of the file
    ids: np.ndarray  # uint16 or uint32 [n]
    learn: np.ndarray  # bool [n]: the tokens to be learnt, which is to predict them
    starts: np.ndarray  # int64 [documents]


@dataclass(frozen=True)
class _Document:
    """Text with the characters to be learnt (None: all of it), or ids after a prompt."""

    text: str = ""
    spans: list[tuple[int, int]] | None = None
    ids: np.ndarray | None = None
    prompt: int = 0


def encode_stream(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    exclude_licenses: Sequence[str] = (),
    loss_on: str = "assistant",
) -> Stream:
    """All documents of a file, and which of their tokens are to be learnt. Lines that cannot be
    used are named in one line; raises DataError if none can.

    With ``loss_on`` "assistant" these are, of a conversation, the assistant's with the end token
    of each answer; of ids those after the prompt; of other text all.
    """
    reader, records = _Reader(tokenizer, loss_on), Records(path, exclude_licenses)
    chunks: list[list[np.ndarray]] = []  # ids, and which are to be learnt
    lengths: list[int] = []
    tokens = 0
    size = path.stat().st_size if path.is_file() else None
    with stage(f"tokenising {path.name}", total=size, unit="B") as doing:
        documents = records.made(reader.read, records.numbered(doing.advance))
        while chunk := [document for _, document in islice(documents, _CHUNK)]:
            encoded = reader.encode(chunk)
            lengths += [len(ids) for ids, _ in encoded]
            chunks.append([np.concatenate(rows) for rows in zip(*encoded, strict=True)])
            tokens += len(chunks[-1][0])
            doing.advance(0, f"{len(lengths):,} records, {tokens:,} tokens")
    if not tokens:
        left_out = f" but those under {', '.join(exclude_licenses)}" if exclude_licenses else ""
        why = f": {records.named}" if records.refused else ""
        raise DataError(f"{path} has no usable records{left_out}{why}")
    records.report(len(lengths))
    if reader.writer.searched:
        warn(
            f"{path}: the chat template rewrites earlier turns; {reader.writer.searched:,} answers "
            "were found by their words"
        )
    starts = (np.cumsum(lengths) - lengths)[np.array(lengths) > 0]
    ids, learn = (np.concatenate(rows) for rows in zip(*chunks, strict=True))
    return Stream(path.name, ids, learn, starts)


class _Reader:
    """Records as documents, and documents as the token ids of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loss_on: str) -> None:
        self.writer = ChatWriter(tokenizer)
        self._tokenizer = tokenizer
        # A tokenizer's file may ask for cutting and padding, which are no part of a corpus.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._whole = loss_on == "all"
        self._dtype = np.uint16 if len(tokenizer) <= 65536 else np.uint32
        # What stands before every document: the first token, of a model without one the last.
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._separator = [token for token in (bos, eos) if token is not None][:1]
        self._compared = False  # whether ids were compared with their text
        self._after_plain: bool | None = None  # whether the last document was all to be learnt

    def read(self, record: dict[str, Any]) -> _Document:
        """Raises RefusedError; DataError if ids are those of another tokenizer."""
        if record.get("ids") is not None:
            return self._given(record)
        text, spans = self._written(record)
        return _Document(unicode_text(text), spans)

    def _written(self, record: dict[str, Any]) -> tuple[Any, list[tuple[int, int]] | None]:
        talk = conversation_of(record)
        if talk is None:
            return record["text"], None
        try:
            text, spans = self.writer.write(talk)
        except RefusedError:
            if any(record.get(name) is not None for name in FORMS[1:-1]):
                raise
            return record["text"], None  # as text it can still be learnt
        if not self._whole and not any(start < end for start, end in spans):
            raise RefusedError(
                "its assistant says nothing (paceline train sample has questions answered, "
                "--loss-on all learns the rest)"
            )
        return text, None if self._whole else spans

    def _given(self, record: dict[str, Any]) -> _Document:
        try:
            ids = np.asarray(record["ids"])
        except (ValueError, OverflowError):
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RefusedError("its ids are not a list of whole numbers")
        size = len(self._tokenizer)
        if ids.min() < 0 or ids.max() >= size:
            raise RefusedError(f"it has ids outside the vocabulary (0 to {size - 1})")
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
        return _Document(ids=ids, prompt=0 if self._whole else prompt)

    def encode(self, documents: Sequence[_Document]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each document its ids, and bool of the same shape, which of them are to be learnt."""
        texts = [item.text for item in documents if item.ids is None]
        backend = self._tokenizer.backend_tokenizer
        encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
        encoded = []
        for item in documents:
            if item.ids is not None:
                ids, learn = item.ids.astype(self._dtype), np.arange(len(item.ids)) >= item.prompt
            else:
                encoding = next(encodings)
                ids = np.array(encoding.ids, dtype=self._dtype)
                learn = _learnt(encoding.offsets, item.spans)
            if self._separator:
                if not len(ids) or ids[0] != self._separator[0]:
                    ids = np.concatenate([np.array(self._separator, self._dtype), ids])
                    learn = np.concatenate([[True], learn])
                plain = item.spans is None and not item.prompt
                # The separator is what follows the document before.
                learn[0] = plain if self._after_plain is None else self._after_plain
                self._after_plain = plain
            encoded.append((ids, learn))
        return encoded


def _learnt(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]] | None
) -> np.ndarray:
    """Which tokens begin in one of the spans of characters; all if there are none given."""
    if spans is None:
        return np.ones(len(offsets), dtype=np.bool_)
    # A token that begins before an answer holds the end of its prompt: no decoding meets it.
    first = np.array([start for start, _ in offsets])
    learn = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        learn |= (first >= start) & (first < end)
    return learn


def token_stream(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    exclude_licenses: Sequence[str],
    loss_on: str,
) -> Stream:
    """``encode_stream`` of a run's file, kept below ``folder`` for when the run is resumed. Raises
    DataError and WriteError."""
    made_of = (str(source.path.resolve()), len(tokenizer), *exclude_licenses, loss_on)
    file = folder / f"{source.path.name}.{zlib.crc32(repr(made_of).encode()):08x}.npz"
    try:
        with np.load(file) as saved:
            return Stream(str(saved["name"]), saved["ids"], saved["learn"], saved["starts"])
    except Exception:  # there is none, or damage, which may raise anything
        stream = encode_stream(source.path, tokenizer, exclude_licenses, loss_on)
    write_stream(file, stream)
    return stream


def write_stream(file: Path, stream: Stream) -> None:
    """Raises WriteError."""
    # Not np.savez: an older numpy leaves the archive of a full disk open.
    with write_cached(file, file.parent, "the token stream") as sink, ZipFile(sink, "w") as archive:
        for name, value in vars(stream).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, np.asarray(value))


SHORTEST = 4  # tokens: with fewer there is nowhere to draft from


@dataclass(frozen=True)
class Windows:
    """Pieces of text side by side: ``ids`` int64 ``[B, W]``, shorter ones padded at the end, and
    ``learn`` bool ``[B, W]``, the tokens to be learnt."""

    ids: torch.Tensor
    learn: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def drafts(self) -> int:
        """Positions that drafts start from: the token after the next one is to be learnt."""
        return int(self.learn[:, 2:].sum())


class Documents:
    """Pieces of documents of several files, each a document's next ``longest`` tokens.

    Files are drawn by weight, the pieces of a file in a new order every time through. Batch n
    depends only on the seed and n. Raises DataError if a file has no piece to learn from.
    """

    def __init__(
        self, streams: Sequence[Stream], weights: Sequence[float], seed: int, longest: int
    ) -> None:
        self.streams = list(streams)
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self.longest = longest
        self.pieces: list[tuple[np.ndarray, np.ndarray]] = []  # ids, and which are to be learnt
        self._of: list[range] = []  # numbers of the pieces of each file
        for stream in self.streams:
            first = len(self.pieces)
            self.pieces.extend(self._cut(stream))
            if len(self.pieces) == first:
                raise DataError(
                    f"{stream.name} has no document of {SHORTEST} tokens or more to learn from"
                )
            self._of.append(range(first, len(self.pieces)))
        self._drawn = self._draws(seed)
        self._batches: list[list[int]] = []

    def _cut(self, stream: Stream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin, end in pairwise([*stream.starts.tolist(), len(stream.ids)]):
            # The separator behind a text is its end, which is to be learnt with it.
            if end < len(stream.ids) and stream.learn[end] and stream.ids[end] == stream.ids[begin]:
                end += 1
            for start in range(begin, end, self.longest):
                part = slice(start, min(end, start + self.longest))
                ids, learn = stream.ids[part], stream.learn[part]
                if len(ids) >= SHORTEST and learn[2:].any():
                    yield ids, learn

    def _draws(self, seed: int) -> Iterator[int]:
        """Numbers of pieces without end."""
        rng = np.random.default_rng(seed)
        left: list[list[int]] = [[] for _ in self._of]
        while True:
            index = int(rng.choice(len(self._of), p=self.weights))
            if not left[index]:
                left[index] = rng.permutation(self._of[index]).tolist()
            yield left[index].pop()

    def tokens(self, number: int) -> int:
        return len(self.pieces[number][0])

    def batch(self, step: int, tokens: int) -> list[int]:
        """Numbers of the pieces of batch ``step``: as many as reach ``tokens``, one at least. All
        batches are asked for with the same ``tokens``."""
        while len(self._batches) <= step:
            numbers, size = [], 0
            while size < tokens:
                numbers.append(next(self._drawn))
                size += self.tokens(numbers[-1])
            self._batches.append(numbers)
        return self._batches[step]

    def windows(self, numbers: Sequence[int], tokens: int) -> list[Windows]:
        """The pieces side by side, those of like length together, in parts of at most ``tokens``
        with their padding (a single piece may be longer)."""
        parts: list[list[int]] = []
        for number in sorted(numbers, key=lambda n: (self.tokens(n), n)):
            if parts and self.tokens(number) * (len(parts[-1]) + 1) <= tokens:
                parts[-1].append(number)
            else:
                parts.append([number])
        return [self._side_by_side([[n] for n in part]) for part in parts]

    def joined(self, numbers: Sequence[int], length: int) -> list[Windows]:
        """The pieces one behind the other, in windows of at most ``length``: for the positions
        that no single one reaches."""
        runs: list[list[int]] = []
        size = 0
        for number in numbers:
            if not runs or size + self.tokens(number) > length:
                runs.append([])
                size = 0
            runs[-1].append(number)
            size += self.tokens(number)
        return [self._side_by_side([run]) for run in runs]

    def _side_by_side(self, runs: list[list[int]]) -> Windows:
        """A window of each run of pieces."""
        ids = [np.concatenate([self.pieces[n][0] for n in run]).astype(np.int64) for run in runs]
        learn = [np.concatenate([self.pieces[n][1] for n in run]) for run in runs]
        padded, to_learn = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
            for rows in (ids, learn)
        )
        return Windows(padded, to_learn, tuple(map(len, ids)))

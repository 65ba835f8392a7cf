"""Tokenises data files, with a loss mask, and makes batches of their documents.

A record has ``messages``, ``conversations`` or ``turns``, which are rendered by the target's chat
template; ``text``, possibly in turns (``parse_turns``); or ``ids``, of which the first ``prompt``
are the prompt. Drafts are trained on documents from their first token on, in batches of similar
length. A window from the middle of a text would not do: the target has not read what comes before
it, so its features would differ from those in decoding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from paceline.core.stages import stage, warn
from paceline.errors import DataError, ModelLoadError
from paceline.files import FileStamp, atomic_write
from paceline.model.tensorfile import as_bytes, load_tensors
from paceline.train.chat import ChatWriter, conversation_from_record
from paceline.train.records import FORMS, RecordError, Records, Source, checked_text

_CHUNK = 256  # records that are tokenised together


@dataclass(frozen=True)
class TokenStream:
    """The documents of one file, concatenated; each begins with the separator token."""

    name: str  # of the file
    ids: np.ndarray  # uint16 or uint32 [n]
    loss_mask: np.ndarray  # bool [n]: the tokens whose prediction is trained
    starts: np.ndarray  # int64 [documents]


@dataclass(frozen=True)
class _Document:
    """Either text with the spans of characters to train on (None: all), or token ids, of which the
    first ``prompt`` are not trained on."""

    text: str = ""
    spans: list[tuple[int, int]] | None = None
    ids: np.ndarray | None = None
    prompt: int = 0


def encode_stream(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    exclude_licenses: Sequence[str] = (),
    loss_on: str = "assistant",
) -> TokenStream:
    """Tokenise a file. Unusable lines are reported in one line; raises DataError if all are. With
    ``loss_on`` "assistant" the loss mask covers the assistant's answers in conversations, including
    their end tokens; token ids after the prompt; and all of other text."""
    reader, records = _Reader(tokenizer, loss_on), Records(path, exclude_licenses)
    chunks: list[list[np.ndarray]] = []  # token ids and loss mask
    lengths: list[int] = []
    tokens = 0
    size = path.stat().st_size if path.is_file() else None
    with stage(f"tokenising {path.name}", total=size, unit="B") as progress:
        documents = records.convert(reader.read, records.numbered(progress.advance))
        while chunk := [document for _, document in islice(documents, _CHUNK)]:
            encoded = reader.encode(chunk)
            lengths += [len(ids) for ids, _ in encoded]
            chunks.append([np.concatenate(rows) for rows in zip(*encoded, strict=True)])
            tokens += len(chunks[-1][0])
            progress.advance(0, f"{len(lengths):,} records, {tokens:,} tokens")
    if not tokens:
        excluded = f" except those under {', '.join(exclude_licenses)}" if exclude_licenses else ""
        why = f": {records.refused_lines}" if records.refused else ""
        raise DataError(f"{path} has no usable records{excluded}{why}")
    records.report(len(lengths))
    if reader.writer.searched:
        warn(
            f"{path}: the chat template rewrites earlier turns; {reader.writer.searched:,} answers "
            "were located by searching for their text"
        )
    starts = (np.cumsum(lengths) - lengths)[np.array(lengths) > 0]
    ids, loss_mask = (np.concatenate(rows) for rows in zip(*chunks, strict=True))
    return TokenStream(path.name, ids, loss_mask, starts)


def checked_ids(record: dict[str, Any], size: int, after: int) -> tuple[np.ndarray, int]:
    """The token ids of a record, all below ``size``, and how many are its prompt, which at least
    ``after`` others follow. Raises RecordError."""
    try:
        ids = np.asarray(record["ids"])
    except (ValueError, OverflowError):
        ids = np.zeros(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RecordError("its ids are not a list of whole numbers")
    if ids.min() < 0 or ids.max() >= size:
        raise RecordError(f"it has ids outside the vocabulary (0 to {size - 1})")
    prompt = record.get("prompt") or 0
    if not isinstance(prompt, int) or not 0 <= prompt <= len(ids) - after:
        than = "less than" if after else "at most"
        raise RecordError(
            f"its prompt is {prompt!r}, but it must be a number {than} the number of ids"
        )
    return ids, prompt


class _Reader:
    """Converts records to documents, and documents to token ids with a loss mask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loss_on: str) -> None:
        self.writer = ChatWriter(tokenizer)
        self._tokenizer = tokenizer
        # The files of a tokenizer may configure truncation and padding; data files need neither.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._whole = loss_on == "all"
        self._dtype = np.uint16 if len(tokenizer) <= 65536 else np.uint32
        # The token in front of every document: the BOS token or, if there is none, the EOS token.
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._separator = [token for token in (bos, eos) if token is not None][:1]
        self._compared = False  # whether the ids of a record were compared with its text
        self._after_unmasked: bool | None = None  # whether the previous document had no mask

    def read(self, record: dict[str, Any]) -> _Document:
        """A record's document. Raises RecordError; DataError for ids of another tokenizer."""
        if record.get("ids") is not None:
            return self._ids_document(record)
        conversation, text, spans = conversation_from_record(record), record.get("text"), None
        if conversation is not None:
            try:
                text, spans = self.writer.write(conversation)
            except RecordError:  # a text is then trained on as plain text
                if any(record.get(name) is not None for name in FORMS[1:-1]):
                    raise
        if self._whole:
            spans = None
        elif spans is not None and not any(start < end for start, end in spans):
            raise RecordError(
                "it has no answers (paceline train sample generates answers, --loss-on all trains "
                "on the questions)"
            )
        return _Document(checked_text(text), spans)

    def _ids_document(self, record: dict[str, Any]) -> _Document:
        ids, prompt = checked_ids(record, len(self._tokenizer), after=1)
        if not self._compared and isinstance(record.get("text"), str):
            self._compared = True
            if self._tokenizer.decode(ids.tolist()) != record["text"]:
                raise DataError(
                    "the ids of a data file belong to another tokenizer: this model's decodes them "
                    "to a different text; generate data with this model (paceline train sample)"
                )
        return _Document(ids=ids, prompt=0 if self._whole else prompt)

    def encode(self, documents: Sequence[_Document]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids and the loss mask (bool) of each document."""
        texts = [item.text for item in documents if item.ids is None]
        backend = self._tokenizer.backend_tokenizer
        encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
        encoded = []
        for item in documents:
            if item.ids is not None:
                ids = item.ids.astype(self._dtype)
                loss_mask = np.arange(len(ids)) >= item.prompt
            else:
                encoding = next(encodings)
                ids = np.array(encoding.ids, dtype=self._dtype)
                loss_mask = np.full(len(ids), item.spans is None)
                # A token that begins before an answer includes the end of the prompt, which does
                # not happen in decoding.
                first = np.array([start for start, _ in encoding.offsets])
                for start, end in item.spans or ():
                    loss_mask |= (first >= start) & (first < end)
            if self._separator:
                if not len(ids) or ids[0] != self._separator[0]:
                    ids = np.concatenate([np.array(self._separator, self._dtype), ids])
                    loss_mask = np.concatenate([[True], loss_mask])
                unmasked = item.spans is None and not item.prompt
                # The separator also ends the previous document, which decides whether it counts.
                previous = self._after_unmasked
                loss_mask[0] = unmasked if previous is None else previous
                self._after_unmasked = unmasked
            encoded.append((ids, loss_mask))
        return encoded


def load_token_stream(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    exclude_licenses: Sequence[str],
    loss_on: str,
) -> TokenStream:
    """``encode_stream``, stored in ``folder`` for a resumed run. Raises DataError, WriteError."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    key = (FileStamp.of(source.path), vocabulary, *exclude_licenses, loss_on)
    file = folder / f"{source.path.name}.{zlib.crc32(repr(key).encode()):08x}.safetensors"
    if (stored := load_cached(file)) is not None:
        return TokenStream(source.path.name, **{key: stored[key].numpy() for key in stored})
    stream = encode_stream(source.path, tokenizer, exclude_licenses, loss_on)
    arrays = {"ids": stream.ids, "loss_mask": stream.loss_mask, "starts": stream.starts}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    store_cached(file, "the token stream", tensors)
    return stream


def load_cached(file: Path) -> dict[str, torch.Tensor] | None:
    """What ``store_cached`` wrote; None if there is no file, or it is damaged."""
    with suppress(ModelLoadError):
        if file.is_file():
            return load_tensors(file)
    return None


def store_cached(file: Path, what: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors that can be computed again. Raises WriteError."""
    with atomic_write(file, what, durable=False) as sink:
        sink.write(as_bytes(tensors))


SHORTEST = 4  # tokens of a piece; shorter ones have no position to draft from


class Windows(NamedTuple):
    """B sequences, padded at the end to ``ids`` int64 and ``loss_mask`` bool ``[B, W]``."""

    ids: torch.Tensor
    loss_mask: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def drafts(self) -> int:
        """The number of positions t from which drafts start: those with t + 2 in the loss mask."""
        return int(self.loss_mask[:, 2:].sum())


class Documents:
    """The documents of several files, divided into pieces of at most ``longest`` tokens. Each draw
    picks a file by weight, then its next piece; the pieces of a file are reshuffled for each epoch.
    Batch n depends only on the seed and n. Raises DataError if a file has no usable piece."""

    def __init__(
        self, streams: Sequence[TokenStream], weights: Sequence[float], seed: int, longest: int
    ) -> None:
        self.streams = list(streams)
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self.longest = longest
        self.pieces: list[tuple[np.ndarray, np.ndarray]] = []  # token ids and loss mask
        self._file_pieces: list[range] = []  # indices of the pieces of each file
        for stream in self.streams:
            first = len(self.pieces)
            self.pieces.extend(self._divide(stream))
            if len(self.pieces) == first:
                raise DataError(
                    f"{stream.name} has no document of {SHORTEST} tokens or more to train on"
                )
            self._file_pieces.append(range(first, len(self.pieces)))
        self._draws = self._draw(seed)
        self._batches: list[list[int]] = []

    def _divide(self, stream: TokenStream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin, end in pairwise([*stream.starts.tolist(), len(stream.ids)]):
            # The separator after a document is its end token, so it belongs to the document, too.
            if (
                end < len(stream.ids)
                and stream.loss_mask[end]
                and stream.ids[end] == stream.ids[begin]
            ):
                end += 1
            for start in range(begin, end, self.longest):
                part = slice(start, min(end, start + self.longest))
                ids, loss_mask = stream.ids[part], stream.loss_mask[part]
                if len(ids) >= SHORTEST and loss_mask[2:].any():
                    yield ids, loss_mask

    def _draw(self, seed: int) -> Iterator[int]:
        """Draw indices of pieces without end."""
        rng = np.random.default_rng(seed)
        remaining: list[list[int]] = [[] for _ in self._file_pieces]
        while True:
            file = int(rng.choice(len(self._file_pieces), p=self.weights))
            if not remaining[file]:
                remaining[file] = rng.permutation(self._file_pieces[file]).tolist()
            yield remaining[file].pop()

    def tokens(self, number: int) -> int:
        return len(self.pieces[number][0])

    def batch(self, step: int, tokens: int) -> list[int]:
        """The indices of the pieces of batch ``step``: as many as are needed for ``tokens`` tokens.
        All calls must have the same ``tokens``."""
        while len(self._batches) <= step:
            numbers, size = [], 0
            while size < tokens:
                numbers.append(next(self._draws))
                size += self.tokens(numbers[-1])
            self._batches.append(numbers)
        return self._batches[step]

    def windows(self, numbers: Sequence[int], tokens: int) -> list[Windows]:
        """Batches of similarly long pieces; if of several, of at most ``tokens`` with padding."""
        ordered = sorted(numbers, key=lambda n: (self.tokens(n), n))
        parts = _groups(ordered, lambda part: self.tokens(part[-1]) * len(part) <= tokens)
        return [self._batch([[n] for n in part]) for part in parts]

    def packed_windows(self, numbers: Sequence[int], length: int) -> list[Windows]:
        """The pieces packed into sequences of at most ``length`` tokens, one per batch: for
        training on positions that no single piece reaches."""
        runs = _groups(numbers, lambda run: sum(map(self.tokens, run)) <= length)
        return [self._batch([run]) for run in runs]

    def _batch(self, runs: list[list[int]]) -> Windows:
        """A batch with one sequence for each run of pieces."""
        ids = [np.concatenate([self.pieces[n][0] for n in run]).astype(np.int64) for run in runs]
        loss_mask = [np.concatenate([self.pieces[n][1] for n in run]) for run in runs]
        padded_ids, padded_mask = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
            for rows in (ids, loss_mask)
        )
        return Windows(padded_ids, padded_mask, tuple(map(len, ids)))


def _groups(numbers: Sequence[int], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """The numbers in groups, each as long as it ``fits``."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and fits([*groups[-1], number]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups

"""Suffix decoding: continue as this text, or earlier outputs, most often went on.

Oliaro, Jia, Campos and Qiao 2024 (SuffixDecoding, arXiv 2411.04975); Snowflake's Arctic Inference.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.suffix_tree import SuffixDraft, SuffixTree
from paceline.errors import ConfigError, DataError, VocabularyMismatchError
from paceline.files import replace_files

_FORMAT = "paceline-suffix"
_VERSION = 1
_SPARE = 2  # nodes of a tree beyond one a level: alternatives are rarely worth more
_CONTEXT = 16  # last tokens of the prompt that go with an output: they match its first token


@dataclass(frozen=True)
class SuffixOptions:
    """How suffixes are matched and drafts are grown. Checked on construction.

    ``max_depth``: longest match, in tokens. A match of m tokens allows ``factor * m + offset``
    nodes, at most ``nodes`` (None: two more than the draft length), none with an estimated
    probability below ``min_prob``. ``max_tokens``: size of the global tree; 0 switches it off.
    """

    max_depth: int = 64
    factor: float = 1.0
    offset: float = 4.0
    min_prob: float = 0.1
    nodes: int | None = None
    max_tokens: int = 500_000  # about 45 MB

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise ConfigError(f"suffix: max_depth is {self.max_depth}; it must be at least 1")
        # Written so that not-a-number is refused as well.
        if not (0 <= self.factor < 1e6 and 0 <= self.offset < 1e6):
            raise ConfigError(
                f"suffix: factor is {self.factor} and offset is {self.offset}; use 0 or more"
            )
        if self.factor + self.offset < 1:
            raise ConfigError("suffix: factor + offset is below 1; it would hardly ever draft")
        if not 0 < self.min_prob <= 1:
            raise ConfigError(f"suffix: min_prob is {self.min_prob}; use a number above 0, up to 1")
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"suffix: nodes is {self.nodes}; it must be at least 1")
        if self.max_tokens < 0:
            raise ConfigError(f"suffix: max_tokens is {self.max_tokens}; use 0 or more")


@dataclass
class _Local:
    """A request being decoded: its text from the end of the prompt on, the suffix tree of all of
    it, and its last match."""

    text: list[int]
    tree: SuffixTree
    match: int = 0


class SuffixDrafter:
    """Matches the end of each text in its own suffix tree and in a global one of earlier outputs.

    Of the two drafts, the one that expects more accepted tokens is proposed. A request's output
    enters the global tree when it finishes, as a whole, together with the last few tokens of its
    prompt (cancelled requests never enter). Beyond ``max_tokens`` the oldest outputs are dropped.
    The global tree lives as long as the drafter; ``save`` and ``load`` keep it longer.

    A step takes about 0.1 ms per sequence, most of it for looking up.
    """

    name = "suffix"
    features: tuple[int, ...] = ()

    def __init__(
        self,
        device: torch.device | str,
        vocab_size: int,
        options: SuffixOptions | None = None,
        file: str | Path | None = None,
    ) -> None:
        """``file`` is where ``save`` writes by default; it is loaded if it exists.

        Raises what ``load`` raises, and ConfigError for a file without a global tree.
        """
        self.options = options or SuffixOptions()
        self._device = device
        self._vocab_size = vocab_size
        self._file = None if file is None else Path(file)
        self._global = SuffixTree(self.options.max_depth)
        self._locals: dict[int, _Local] = {}
        self._finished: deque[Sequence[int]] = deque()  # outputs not in the global tree yet
        self._empty = TokenTree.empty(device)
        if self._file is not None:
            if not self.options.max_tokens:
                raise ConfigError("suffix: a file holds the global tree, which is switched off")
            if self._file.exists():
                self.load(self._file)

    @property
    def stored_tokens(self) -> int:
        """Tokens in the global tree."""
        self._catch_up()
        return len(self._global)

    def clear(self) -> None:
        """Forget all earlier outputs, as a drafter that has just been made."""
        self._global = SuffixTree(self.options.max_depth)
        self._finished.clear()

    def max_nodes(self, length: int) -> int:
        if self.options.nodes is None:
            return length + _SPARE if length else 0
        # Siblings share a probability of one: a level has no more than 1 / min_prob nodes.
        return min(self.options.nodes, length * int(1 / self.options.min_prob + 1e-9))

    def passes(self, length: int) -> int:
        return 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            seq = item.seq
            if seq.seq_id not in self._locals:
                text = seq.tokens[max(0, seq.prompt_length - _CONTEXT) :]
                self._locals[seq.seq_id] = _Local(list(text), SuffixTree(self.options.max_depth))
        return [self._tree(item) for item in plan.slices]

    def _tree(self, item: Slice) -> TokenTree:
        if not item.decodes or not item.draft_length:
            return self._empty
        guess = self._speculate(item.seq, item.draft_length)
        self._locals[item.seq.seq_id].match = guess.match
        if not guess.tokens:
            return self._empty
        return TokenTree(to_device(guess.tokens, self._device), guess.parents)

    def _speculate(self, seq: SequenceView, length: int) -> SuffixDraft:
        """The better draft of the two trees."""
        options = self.options
        self._catch_up()
        local = self._locals[seq.seq_id].tree
        local.extend(seq.tokens[local.open_tokens :])
        text = seq.tokens[-options.max_depth :]
        best = SuffixDraft([], (), 0.0, 0)
        for tree in (local, self._global):
            guess = tree.speculate(
                text,
                length,
                self.max_nodes(length),
                options.factor,
                options.offset,
                options.min_prob,
            )
            if guess.score > best.score:
                best = guess
        return best

    def confidence(self, seq_id: int) -> int:
        """Of the last draft: bits of the match length, 0 for none (pace/hybrid.py asks)."""
        local = self._locals.get(seq_id)
        return local.match.bit_length() if local is not None else 0

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for commit in commits:
            local = self._locals.get(commit.seq_id)
            if local is None:
                continue
            local.text += commit.tokens
            if commit.finish_reason is not None:
                self._finished.append(local.text)
                self._bound_finished()

    def _bound_finished(self) -> None:
        """Where nothing asks for drafts, outputs come and none is put in: keep what would stay."""
        if len(self._finished) % 64 == 0:
            total = sum(map(len, self._finished))
            while total > self.options.max_tokens and self._finished:
                total -= len(self._finished.popleft())

    def _catch_up(self) -> None:
        """Put finished outputs into the global tree: only a step that drafts pays for them."""
        while self._finished:
            self._remember(self._finished.popleft())

    def _remember(self, text: Sequence[int]) -> None:
        """Put a text into the global tree, and drop the oldest ones that no longer fit."""
        if len(text) > self.options.max_tokens:
            return
        self._global.extend(text)
        self._global.finish()
        while len(self._global) > self.options.max_tokens:
            self._global.drop_oldest()

    def rehearse(self, batch_size: int) -> None:
        pass  # dictionary lookups: little beside a forward

    def forget(self, seq_id: int) -> None:
        self._locals.pop(seq_id, None)

    # -- the global tree on disk ---------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path:
        """Write the texts of the global tree to a file; by default the one of the draft spec.

        The file is a line of JSON (format, version, vocab_size, tokens, sha256 of the rest), then
        int32 ids, little endian, -1 behind each text, oldest first. It is replaced as a whole or
        not at all. Raises ConfigError without a path, WriteError if it cannot be written.
        """
        target = self._file if path is None else Path(path)
        if target is None:
            raise ConfigError("suffix: nowhere to save; give save a path or use suffix:FILE")
        self._catch_up()
        stream = array("i")
        for text in self._global.texts():
            stream.extend([*text, -1])
        body = _little_endian(stream).tobytes()
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "vocab_size": self._vocab_size,
            "tokens": len(stream),
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        replace_files({target: json.dumps(head).encode() + b"\n" + body}, "the suffix tree")
        return target

    def load(self, path: str | Path) -> None:
        """Add the texts of a saved tree to the global tree.

        Raises DataError for a file that is not a saved suffix tree or is cut short, and
        VocabularyMismatchError for one of a model with another vocabulary.
        """
        for text in _read(Path(path), self._vocab_size):
            self._remember(text)


def _read(path: Path, vocab_size: int) -> list[array[int]]:
    """The texts in a saved suffix tree, oldest first."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the suffix tree {path}: {error.strerror}") from None
    first, _, body = content.partition(b"\n")
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise DataError(f"{path} is not a saved suffix tree; name another file or move it away")
    if head.get("version") != _VERSION:
        raise DataError(
            f"{path} is a suffix tree of version {head.get('version')}, this program reads "
            f"version {_VERSION}; move it away to start a new one"
        )
    if head.get("vocab_size") != vocab_size:
        raise VocabularyMismatchError(
            f"{path} is a suffix tree of a model with {head.get('vocab_size')} tokens, this one "
            f"has {vocab_size}; use one file per model"
        )
    stream = array("i")
    if len(body) / stream.itemsize != head.get("tokens"):
        raise DataError(f"{path} is a damaged suffix tree: cut short; move it away")
    if head.get("sha256") not in (None, hashlib.sha256(body).hexdigest()):
        raise DataError(
            f"{path} is a damaged suffix tree: it does not match its checksum; move it away"
        )
    stream.frombytes(body)
    stream = _little_endian(stream)
    if stream and (min(stream) < -1 or max(stream) >= vocab_size or stream[-1] != -1):
        raise DataError(f"{path} is a damaged suffix tree: it holds no such tokens; move it away")
    texts = []
    start = 0
    for end, token in enumerate(stream):
        if token < 0:
            texts.append(stream[start:end])
            start = end + 1
    return texts


def _little_endian(stream: array[int]) -> array[int]:
    """From the machine's byte order to the file's, or back."""
    if sys.byteorder == "big":
        stream = array("i", stream)
        stream.byteswap()
    return stream

"""String-level drafts: a draft model writes in its vocabulary, the target tokenises the text.

Timor et al. 2025 (arXiv 2502.05202), "string-level exact match". Works for any two tokenizers that
decode what they encode. Drafts are the draft's likeliest tokens, also for sampled requests: without
common ids there is no q, so trees are POINT. Texts are on the host: one more synchronisation per
draft.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.batch import Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceView
from paceline.draft.vocabulary.shared import Match

# Between two words: every tokenizer begins a new token there, whatever follows.
_BORDER = re.compile(r"(?<=\w) (?=\w)")
_LEAD = 32  # characters before a text that are encoded with it, for the sake of its spacing
_TAIL = 256  # longest text without a border between words that is encoded again and again


class Retokeniser:
    """A sequence's committed text in the draft's tokens. ``settled`` ones never change; those of
    the last word do when it grows::

        Once upon a time there was a ho|use
        settled ..................|tail
    """

    def __init__(self, match: Match) -> None:
        self._target, self._draft, self._pairs = match.target, match.draft, match.pairs
        self._back = {theirs: ours for ours, theirs in match.pairs.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.settled: list[int] = []
        self._lead = ""
        self._tail = ""
        self._read = 0

    @property
    def waits(self) -> bool:
        """Whether the text so far ends within a character."""
        return bool(self._decoder.getstate()[0])

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens appended since the last call."""
        if not self._read:
            self._begin(tokens)
        for token in tokens[self._read :]:
            if token in self._target.special:
                self._tail += self._decoder.decode(b"", final=True)
                self._settle(len(self._tail))
                self.settled += self._special(token)
                self._lead = ""
            else:
                self._tail += self._decoder.decode(self._target.strings.get(token, b""))
        self._read = len(tokens)
        borders = [match.start() for match in _BORDER.finditer(self._tail)]
        self._settle(borders[-1] if borders else max(0, len(self._tail) - _TAIL))

    def _begin(self, tokens: Sequence[int]) -> None:
        """Begin with a beginning-of-text token if the draft uses one."""
        opening: list[int] = self._draft.tokenizer.encode("")
        bos = self._draft.tokenizer.bos_token_id
        if opening[:1] == [bos] and self._pairs.get(tokens[0]) != bos:
            self.settled.append(bos)

    def _special(self, token: int) -> list[int]:
        shared = self._pairs.get(token)
        if shared is not None:
            return [shared]
        if token == self._target.tokenizer.bos_token_id:
            return []  # a draft without such a token never saw one
        return self._draft.encode(self._target.special[token])

    def _settle(self, end: int) -> None:
        text, self._tail = self._tail[:end], self._tail[end:]
        if text:
            self.settled += self._encode(text)
            self._lead = (self._lead + text)[-_LEAD:]

    def _encode(self, text: str) -> list[int]:
        ids = self._draft.after(self._lead, text)
        return self._draft.encode(text) if ids is None else ids

    def context(self) -> list[int]:
        """All of the text in the draft's tokens."""
        return self.settled + (self._encode(self._tail) if self._tail else [])

    def proposal(self, drafted: Sequence[int]) -> list[int]:
        """The target's tokens of a drafted continuation, cut at the last whole character and after
        a special token; [] if a token would span the border."""
        data = bytearray()
        end: list[int] = []
        for token in drafted:
            if token in self._draft.special:
                end = [self._back[token]] if token in self._back else []
                break
            data += self._draft.strings.get(token, b"")
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data))
        whole = text.partition("\ufffd")[0]
        ids = self._target.after(self._lead + self._tail, whole)
        if ids is None:
            return []
        return ids + end if len(whole.encode()) == len(data) else ids


class Shadow:
    """A sequence in the draft model's tokens, greedy."""

    def __init__(self, seq_id: int, match: Match) -> None:
        self.text = Retokeniser(match)
        self.request = SequenceView(seq_id, (), 0, SamplingParams())

    def slice_of(self, item: Slice) -> Slice:
        """The draft's part in the step: as much of a prompt as the target reads of its own."""
        if item.decodes and not item.draft_length:
            return Slice(self.request, len(self.request.tokens))  # left alone; caught up on later
        self.text.extend(item.seq.tokens)
        tokens = self.text.context()
        self.request = replace(self.request, tokens=tokens)
        if item.decodes:
            return Slice(self.request, len(tokens), 0 if self.text.waits else item.draft_length)
        share = len(tokens) * (item.seq.cached + item.scheduled) // len(item.seq.tokens)
        return Slice(self.request, min(share, len(tokens) - 1))

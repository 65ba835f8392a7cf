"""Tokens to text, one at a time; the pieces together are what a decode of all tokens gives."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paceline.model.decoders import ByteRun, DecoderStage, DropBeginning, Whole, bytes_of, parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of a prompt only its ends are decoded: the beginning decides what a decoder does at a beginning,
# the end what tokens after it mean. No character is longer than four tokens, and what is stripped
# off a beginning is shorter than this.
_EDGE = 16


class Spelling:
    """What texts of one tokenizer share: the names of tokens and the parts of the decoder."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._names: dict[int, str | None] = {}
        self.parts = parts_of(self._backend.decoder)
        self.whole = any(isinstance(part, Whole) for part in self.parts)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Spelling:
        spelling = _spellings.get(tokenizer)
        if spelling is None:
            spelling = _spellings[tokenizer] = cls(tokenizer)
        return spelling

    def name(self, token: int, skip_special: bool) -> str | None:
        """How the vocabulary writes a token; None if it is not part of the text."""
        try:
            name = self._names[token]
        except KeyError:
            name = self._names[token] = self._backend.id_to_token(token)
        return None if skip_special and name in self._special else name

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for in the middle of a text; none if it has no name."""
        return bytes_of(self.parts, self.name(token, skip_special=False) or "")


_spellings: WeakKeyDictionary[PreTrainedTokenizerFast, Spelling] = WeakKeyDictionary()


class Detokeniser:
    """The text that follows a prompt, as ``feed`` by ``feed`` it becomes certain.

    All that it gives, with ``flush`` at the end, is what a decode of prompt and tokens has that a
    decode of the prompt alone does not begin with. Time is linear in tokens. What can still change
    waits: a character that is not whole, and with byte fallback a run of bytes as long as it is
    valid, however long that is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt: Sequence[int] = (),
        skip_special: bool = True,
    ) -> None:
        self._spelling = Spelling.of(tokenizer)
        self._skip = skip_special
        edges = self._edges(prompt)
        self._stages = self._read(edges)
        if edges:
            # What the prompt's own text ends with may only now become something else.
            ending = self._flush(self._read(edges))
            if ending:
                self._stages.append(DropBeginning(ending))
        self.guess = ""
        self._run, self._after = self._byte_run()
        self._ahead: list[DecoderStage] | None = None  # those after the run, as if it had ended
        if self._run is not None and self._run.length:
            self._look_ahead(self._run.text)
            self.guess = ""

    def feed(self, token: int) -> str:
        """What is certain now and was not before this token.

        ``guess`` is then what the token added to a run of bytes that is ``waiting``: it stands if
        the run ends here, and is void if the run turns out to be no text.
        """
        self.guess = ""
        name = self._spelling.name(token, self._skip)
        if name is None:
            return ""
        certain = _through(self._stages, [name])
        if self._run is not None:
            self._look_ahead(self._run.fresh)
        return certain

    @property
    def waiting(self) -> bool:
        """Whether there is a run of bytes that is text so far."""
        return self._run is not None and self._run.length > 0

    def _look_ahead(self, fresh: str) -> None:
        if not self.waiting:
            self._ahead = None
            return
        if self._ahead is None:
            self._ahead = [copy(stage) for stage in self._after]
        self.guess = _through(self._ahead, [fresh]) if fresh else ""

    def flush(self, whole: bool = False) -> str:
        """The rest. Bytes of an unfinished character become U+FFFD, or nothing if only ``whole``
        characters are wanted."""
        for stage in self._stages if whole else ():
            stage.drop_unfinished()
        return self._flush(self._stages)

    def _edges(self, prompt: Sequence[int]) -> list[str]:
        """The names of the prompt's tokens, if there are many without those in the middle."""
        limit = len(prompt) if self._spelling.whole else _EDGE
        first: list[str] = []
        taken = 0
        while taken < len(prompt) and len(first) < limit:
            name = self._spelling.name(prompt[taken], self._skip)
            if name is not None:
                first.append(name)
            taken += 1
        last: list[str] = []
        for index in range(len(prompt) - 1, taken - 1, -1):
            name = self._spelling.name(prompt[index], self._skip)
            if name is None:
                continue
            last.append(name)
            # The first of them must not be part of a run of bytes.
            if len(last) >= _EDGE and not name.startswith("<0x"):
                break
        return first + last[::-1]

    def _read(self, names: list[str]) -> list[DecoderStage]:
        stages = [part.begun() for part in self._spelling.parts]
        for name in names:
            _through(stages, [name])
        return stages

    def _byte_run(self) -> tuple[ByteRun | None, list[DecoderStage]]:
        """The stage of byte fallback and those after it, if a guess can be told from them."""
        for index, stage in enumerate(self._stages):
            after = self._stages[index + 1 :]
            if isinstance(stage, ByteRun) and all(isinstance(s, DropBeginning) for s in after):
                return stage, after
        return None, []

    @staticmethod
    def _flush(stages: list[DecoderStage]) -> str:
        pieces: list[str] = []
        for stage in stages:
            pieces = [out for piece in pieces for out in stage.feed(piece)] + stage.flush()
        return "".join(pieces)


def _through(stages: Sequence[DecoderStage], pieces: list[str]) -> str:
    for stage in stages:
        if len(pieces) == 1:
            pieces = stage.feed(pieces[0])
        else:
            pieces = [out for piece in pieces for out in stage.feed(piece)]
    return "".join(pieces)

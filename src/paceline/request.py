"""One completion in the making: collects commits, makes events and the final record."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from paceline.completion import Completion, CompletionStats, StreamEvent
from paceline.core.batch import Commit, TokenLogprob
from paceline.core.sequence import Sequence
from paceline.engine.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Request:
    """A sequence, where it belongs, and what was committed to it so far."""

    def __init__(
        self,
        seq: Sequence,
        prompt: str | list[int],
        number: int,
        index: int,
        tokenizer: PreTrainedTokenizerFast,
        streams: bool,
        lossy: bool = False,
    ) -> None:
        self.seq = seq
        self.prompt = prompt
        self.number = number
        self.index = index
        self.completion: Completion | None = None
        self.events: deque[StreamEvent] = deque()
        self._tokenizer = tokenizer
        self._streams = streams
        self._lossy = lossy
        self._draft_mask: list[bool] = []
        self._logprobs: list[TokenLogprob] | None = [] if seq.params.logprobs is not None else None
        # Text is decoded token by token only for those who need it while decoding.
        self._text: TextStream | None = None
        params = seq.params
        if streams or params.stop:
            self._text = seq.text = self._new_text()

    def _new_text(self) -> TextStream:
        """Empty, behind the prompt."""
        seq, params = self.seq, self.seq.params
        hidden = None if params.skip_special_tokens else seq.stop_ids
        prompt = seq.tokens[: seq.prompt_length]
        return TextStream(self._tokenizer, params.stop, params.min_tokens, hidden, prompt)

    def absorb(self, commit: Commit) -> None:
        """Take in one commit of this sequence."""
        if not commit.tokens:
            return
        mask = [place < len(commit.path) for place in range(len(commit.tokens))]
        self._draft_mask.extend(mask)
        logprobs = None if commit.logprobs is None else list(commit.logprobs)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs)
        text = self._text.take() if self._text is not None else ""
        if commit.finish_reason is not None:
            text += self._finish(commit.finish_reason)
        if self._streams:
            self.events.append(
                StreamEvent(
                    self.number,
                    self.index,
                    text,
                    list(commit.tokens),
                    mask,
                    self.completion,
                    logprobs,
                )
            )

    def _finish(self, reason: str) -> str:
        """Build the completion; returns the text that had been held back."""
        seq = self.seq
        token_ids = seq.tokens[seq.prompt_length :]
        text = self._text
        if text is None:
            text = self._new_text()
            for token in token_ids:
                text.push(token)
        rest = text.finish()
        if text.stopped:  # perhaps by a stop string that only the end completed
            reason = "stop"
        self.completion = Completion(
            prompt=self.prompt,
            text=text.text,
            token_ids=token_ids,
            logprobs=self._logprobs,
            finish_reason=reason,
            index=self.index,
            draft_mask=self._draft_mask,
            stats=CompletionStats.of(seq, self._lossy),
            lossy=self._lossy,
        )
        return rest

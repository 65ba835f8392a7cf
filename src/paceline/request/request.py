"""One request from its first commit to its Completion: collects tokens, text and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.batch import Commit
from paceline.core.params import TokenLogprob
from paceline.core.sequence import SequenceState
from paceline.engine.recovery import Failure
from paceline.errors import EngineLostError
from paceline.model.tokenizer import Tokenizer
from paceline.request.completion import Completion, CompletionStats, StreamEvent
from paceline.request.receipt import receipt_of
from paceline.request.text import TextStream

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass(eq=False, repr=False)
class Request:
    """A sequence and the text and events that come of its commits.

    ``number``: index of the prompt in the call; ``index``: of the sample, for ``n`` > 1.
    ``streams``: each commit makes an event, otherwise the last one alone. ``hidden``: special
    tokens that are not part of the text, None for all. ``origin``: the part of a receipt that
    describes the LLM; None: no receipt."""

    seq: SequenceState
    prompt: str | list[int]
    number: int
    index: int
    tokenizer: Tokenizer
    streams: bool
    hidden: frozenset[int] = frozenset()
    origin: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        seq = self.seq
        self.lost = False  # whether it ended because the engine was lost
        # Whether a character that max_tokens cuts is left out of the text; else it is U+FFFD.
        self.whole_characters = False
        self.prompt_logprobs: list[TokenLogprob] = []  # of all prompt tokens but the first
        self.completion: Completion | None = None
        self.events: deque[StreamEvent] = deque()
        self._draft_mask: list[bool] = []
        self._drafters: list[str] = []
        self._logprobs: list[TokenLogprob] | None = [] if seq.params.logprobs is not None else None
        # Text is decoded commit by commit only if it is streamed or may have a stop string, for
        # which the engine searches the same stream.
        decodes = self.streams or bool(seq.params.stop)
        self._stream: TextStream | None = self._new_text_stream() if decodes else None
        seq.stops = self._stream if seq.params.stop else None
        self._shown: list[str] = []  # the text of each event

    def _new_text_stream(self) -> TextStream:
        seq, params = self.seq, self.seq.params
        prompt = seq.tokens[: seq.prompt_length]
        stops = params.stop, params.min_tokens, self.hidden, prompt
        shown = params.include_stop_str_in_output, params.skip_special_tokens
        return TextStream(self.tokenizer, *stops, *shown)

    def _decode_all(self) -> TextStream:
        text = self._new_text_stream()
        text.consume(self.seq.tokens[self.seq.prompt_length :])
        return text

    def apply_commit(self, commit: Commit) -> None:
        """Add a commit. Raises nothing: text that cannot be decoded ends the request in error."""
        # A prompt that was preempted is prefilled, and its tokens scored, again.
        already_scored = len(self.prompt_logprobs) - commit.position
        self.prompt_logprobs.extend(commit.prompt_logprobs[max(0, already_scored) :])
        if not commit.tokens and commit.finish_reason is None:
            return
        mask = [index < len(commit.path) for index in range(len(commit.tokens))]
        drafters = [commit.drafter if drafted else "" for drafted in mask]
        self._draft_mask.extend(mask)
        self._drafters.extend(drafters)
        logprobs = None if commit.logprobs is None else list(commit.logprobs)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs)
        try:
            if commit.error is not None:
                text = self._end_with_error(commit.error)
            else:
                text = ""
                if self._stream is not None:
                    if self._stream is not self.seq.stops:  # to which the engine gives the tokens
                        self._stream.consume(commit.tokens)
                    text = self._stream.take()
                if commit.finish_reason is not None:
                    stream, reason = self._stream or self._decode_all(), commit.finish_reason
                    text += stream.finish(whole=self.whole_characters and reason == "length")
                    # A stop string may be complete only at the very end.
                    reason = "stop" if stream.stop else reason
                    self._build_completion(stream.text, reason, stop=stream.stop)
        except Exception as error:
            reason = Failure.of(error).message
            text = self._end_with_error(f"the text could not be decoded: {reason}")
        event, done = partial(StreamEvent, self.number, self.index), self.completion
        if self.streams:
            scores = None if self._shown else self.prompt_logprobs or None
            self._shown.append(text)
            added = text, list(commit.tokens), mask, done, logprobs, scores, drafters
            self.events.append(event(*added))
        elif done is not None:
            whole = done.text, done.token_ids, done.draft_mask, done
            self.events.append(event(*whole, done.logprobs, done.prompt_logprobs, self._drafters))

    def fail(self, message: str) -> None:
        """End the request with an error and the tokens it has, unless it has ended already."""
        if self.completion is None:
            seq_id = self.seq.seq_id
            self.apply_commit(Commit(seq_id, (), finish_reason="error", error=message))

    def _end_with_error(self, error: str) -> str:
        """Build the completion of a failed request; returns the rest of its text."""
        rest, text = "", "".join(self._shown)
        with suppress(Exception):  # the text stream may be what failed
            stream = self._stream or self._decode_all()
            rest, text = stream.finish(), stream.text
        self._build_completion(text, "error", error)
        return rest

    def _build_completion(
        self, text: str, reason: str, error: str | None = None, stop: str | None = None
    ) -> None:
        seq = self.seq
        asked = seq.params.prompt_logprobs is not None
        self.completion = Completion(
            prompt=self.prompt,
            text=text,
            token_ids=seq.tokens[seq.prompt_length :],
            logprobs=self._logprobs,
            finish_reason=reason,
            index=self.index,
            draft_mask=self._draft_mask,
            stats=CompletionStats.of(seq),
            error=error,
            prompt_logprobs=list(self.prompt_logprobs) if asked else None,
            stop_string=stop,
        )
        if self.origin is not None and reason in ("stop", "length"):
            prompt = seq.tokens[: seq.prompt_length]
            receipt = receipt_of(self.origin, seq.params, prompt, self.completion)
            self.completion = replace(self.completion, receipt=receipt)


def advance(engine: Engine, requests: Mapping[int, Request]) -> list[tuple[Request, Commit]]:
    """Run one step and apply its commits to ``requests`` (by sequence id). Returns those that
    advanced, with their commits. Raises EngineLostError, after ending all requests."""
    try:
        commits = engine.step()
    except EngineLostError as error:
        for request in requests.values():
            request.lost = request.completion is None
            request.fail(str(error))
        raise
    advanced = [(requests[c.seq_id], c) for c in commits if c.seq_id in requests]
    for request, commit in advanced:
        request.apply_commit(commit)
        if request.completion is not None and commit.finish_reason is None:
            engine.abort(commit.seq_id)  # its text could not be decoded
    return advanced


def any_ended(requests: Sequence[Request]) -> bool:
    return any(request.completion is not None for request in requests)


def any_events(requests: Sequence[Request]) -> bool:
    return any(request.events for request in requests)


def completions_of(requests: Sequence[Request]) -> list[Completion]:
    """Completions of the ended requests. Raises EngineLostError if the engine was lost."""
    done = [request.completion for request in requests if request.completion is not None]
    for completion, request in zip(done, requests, strict=True):
        if request.lost:
            raise EngineLostError(completion.error)
    return done

"""What answers say of tokens: log-probabilities, and which drafter proposed them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.model.tokenizer import Tokenizer
from paceline.request.text import Detokeniser, Spelling

if TYPE_CHECKING:
    from paceline.core.params import TokenLogprob
    from paceline.request.completion import StreamEvent


def agreement(tokens: Sequence[int], drafted: Sequence[bool], prediction: Sequence[int]) -> int:
    """How many tokens of an answer were drafted and follow its prediction: pairs of neighbours are
    compared, in linear time. At most the prediction's length."""
    pairs = set(pairwise(prediction))
    count = 0
    for index, (token, by_draft) in enumerate(zip(tokens, drafted, strict=True)):
        expected = (tokens[index - 1], token) in pairs if index else token == prediction[0]
        count += by_draft and expected
    return min(count, len(prediction))


def only_ends(tokenizer: Tokenizer, token: int, reason: str | None) -> bool:
    """Whether a last token only ended the text and is not part of it."""
    return reason == "stop" and Spelling.of(tokenizer).name(token, skip_special=True) is None


def finish_reason(event: StreamEvent) -> str | None:
    """Why the text ended with this event; None if it goes on."""
    return None if event.completion is None else event.completion.finish_reason


def visible_logprobs(tokenizer: Tokenizer, event: StreamEvent) -> list[TokenLogprob]:
    """Log-probabilities of the event's tokens that are part of the text."""
    entries = event.logprobs or []
    ended = entries and only_ends(tokenizer, entries[-1].token_id, finish_reason(event))
    return entries[:-1] if ended else entries


def token_records(tokenizer: Tokenizer, event: StreamEvent) -> list[dict[str, Any]]:
    """The event's tokens that are part of the text, with their alternatives, as in chats."""

    def record(token: int, logprob: float) -> dict[str, Any]:
        spelt = Spelling.of(tokenizer).bytes_of(token)
        return {"token": _shown(spelt), "logprob": finite(logprob), "bytes": list(spelt)}

    return [
        record(entry.token_id, entry.logprob) | {"top_logprobs": [record(*e) for e in entry.top]}
        for entry in visible_logprobs(tokenizer, event)
    ]


def _shown(spelt: bytes) -> str:
    """A token's text; bytes that are no character are written as ``\\xe4``."""
    return spelt.decode("utf-8", errors="backslashreplace")


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API uses -9999."""
    return max(logprob, -9999.0)


class Origins:
    """Which drafter each token of one growing text came from. The tokens' texts joined are the text
    before a stop string cuts it. A token that ends inside a character has none; the one that
    completes the character has all of it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], visible: bool = False) -> None:
        """``visible``: special tokens are part of the text, except the one that ends it."""
        self._tokenizer = tokenizer
        self._detokeniser = Detokeniser(tokenizer, prompt, skip_special=not visible)

    def records(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Of an event's tokens, event by event. ``draft_position``: from 0, in the step's draft."""
        records: list[dict[str, Any]] = []
        position, reason = 0, finish_reason(event)
        for index, (token, drafted) in enumerate(
            zip(event.token_ids, event.from_draft, strict=True)
        ):
            last = reason is not None and index == len(event.token_ids) - 1
            ends = last and only_ends(self._tokenizer, token, reason)
            text = "" if ends else self._detokeniser.feed(token)
            logprobs = event.logprobs
            records.append(
                {
                    "id": token,
                    "text": text + self._detokeniser.flush(reason == "length") if last else text,
                    "from_draft": drafted,
                    "draft_position": position if drafted else None,
                    "drafter": event.drafter if drafted else None,
                    "logprob": None if logprobs is None else finite(logprobs[index].logprob),
                }
            )
            position = position + 1 if drafted else 0
        return records


class LogprobColumns:
    """The completions API's logprobs columns of one growing text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._detokeniser = tokenizer, Detokeniser(tokenizer, prompt)
        self._certain = 0  # characters before the next token

    def columns(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the next tokens. ``text_offset``: characters of complete text before the token."""
        offsets = []
        for entry in entries:
            offsets.append(self._certain + len(self._detokeniser.guess()))
            self._certain += len(self._detokeniser.feed(entry.token_id))
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                # The chosen one is always there; of tokens with equal text the likeliest stays.
                {
                    self._name(token): finite(value)
                    for token, value in ((entry.token_id, entry.logprob), *reversed(entry.top))
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """Tokens that are no characters have the prefix ``bytes:``, as in OpenAI's API."""
        spelt = Spelling.of(self._tokenizer).bytes_of(token)
        name = _shown(spelt)
        return name if name.encode() == spelt else f"bytes:{name}"

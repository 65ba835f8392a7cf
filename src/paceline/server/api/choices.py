"""Details of the tokens of an answer: log-probabilities, and which drafter proposed them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paceline.core.params import SamplingParams, TokenLogprob
from paceline.model.tokenizer import Tokenizer
from paceline.request.completion import StreamEvent
from paceline.request.text import Detokeniser, Spelling


def count_predicted_tokens(
    tokens: Sequence[int], drafted: Sequence[bool], prediction: Sequence[int]
) -> int:
    """How many tokens of an answer were drafted, by whichever drafter, and agree with the predicted
    output. A token agrees if it and the token before it are neighbours in the prediction as well,
    which takes linear time. The result is at most the prediction's length."""
    pairs = set(pairwise(prediction))
    count = 0
    for index, (token, by_draft) in enumerate(zip(tokens, drafted, strict=True)):
        expected = (tokens[index - 1], token) in pairs if index else token == prediction[0]
        count += by_draft and expected
    return min(count, len(prediction))


def is_hidden_end_token(
    tokenizer: Tokenizer, token: int, reason: str | None, params: SamplingParams
) -> bool:
    """Whether the last token only ended the text and is not part of it."""
    special = Spelling.of(tokenizer).name(token, skip_special=True) is None
    if params.include_stop_str_in_output:
        hidden = special and (params.skip_special_tokens or params.skip_end_tokens)
    else:
        hidden = special or token in params.stop_token_ids
    return reason == "stop" and hidden


def finish_reason(event: StreamEvent) -> str | None:
    """Why the text ended with this event; None if it has not ended."""
    return None if event.completion is None else event.completion.finish_reason


def visible_logprobs(
    tokenizer: Tokenizer, event: StreamEvent, params: SamplingParams
) -> list[TokenLogprob]:
    """The log-probabilities of those tokens of the event that are part of the text."""
    entries, reason = event.logprobs or [], finish_reason(event)
    ended = entries and is_hidden_end_token(tokenizer, entries[-1].token_id, reason, params)
    return entries[:-1] if ended else entries


def token_records(
    tokenizer: Tokenizer, event: StreamEvent, params: SamplingParams
) -> list[dict[str, Any]]:
    """The tokens of the event's text, with alternatives, in the format of chat completions."""

    def record(token: int, logprob: float) -> dict[str, Any]:
        token_bytes = Spelling.of(tokenizer).bytes_of(token)
        text = _decode(token_bytes)
        return {"token": text, "logprob": finite(logprob), "bytes": list(token_bytes)}

    return [
        record(entry.token_id, entry.logprob) | {"top_logprobs": [record(*e) for e in entry.top]}
        for entry in visible_logprobs(tokenizer, event, params)
    ]


def _decode(token_bytes: bytes) -> str:
    """The text of a token; bytes that are not a character are written as ``\\xe4``."""
    return token_bytes.decode("utf-8", errors="backslashreplace")


def finite(logprob: float) -> float:
    """The log-probability, at least -9999: JSON has no infinity, and OpenAI's API does the same."""
    return max(logprob, -9999.0)


class TokenOrigins:
    """The field ``tokens`` of one growing text: which drafter proposed each token. The texts of the
    tokens, joined, are the text before it is cut at a stop string. A character of several tokens
    belongs to the token that completes it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._detokeniser = Detokeniser(tokenizer, prompt, params.skip_special_tokens)

    def records(self, event: StreamEvent) -> list[dict[str, Any]]:
        """The records of the next event's tokens. ``draft_position`` counts in the step's draft."""
        records: list[dict[str, Any]] = []
        position, reason = 0, finish_reason(event)
        for index, (token, drafted) in enumerate(
            zip(event.token_ids, event.from_draft, strict=True)
        ):
            last = reason is not None and index == len(event.token_ids) - 1
            ends = last and is_hidden_end_token(self._tokenizer, token, reason, self._params)
            text = "" if ends else self._detokeniser.feed(token)
            logprobs = event.logprobs
            records.append(
                {
                    "id": token,
                    "text": text + self._detokeniser.flush(reason == "length") if last else text,
                    "from_draft": drafted,
                    "draft_position": position if drafted else None,
                    "drafter": event.drafters[index] if drafted else None,
                    "logprob": None if logprobs is None else finite(logprobs[index].logprob),
                }
            )
            position = position + 1 if drafted else 0
        return records


class LogprobColumns:
    """The field ``logprobs`` of the completions API, which has columns, of one growing text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool = True, start: int = 0
    ) -> None:
        """The text follows ``prompt`` and begins at offset ``start``; below 0: its first characters
        are not shown."""
        self._tokenizer = tokenizer
        self._detokeniser = Detokeniser(tokenizer, prompt, skip_special)
        self._text_length = start  # and the characters that the detokeniser has returned

    def columns(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The columns of the next tokens. ``text_offset`` counts the characters before a token,
        including those that the detokeniser still holds back."""
        offsets = []
        for entry in entries:
            offsets.append(max(0, self._text_length + len(self._detokeniser.guess())))
            self._text_length += len(self._detokeniser.feed(entry.token_id))
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                # The sampled token is always included. Of tokens with equal text the likeliest
                # comes last, so it is the one that the dict keeps.
                {
                    self._name(token): finite(value)
                    for token, value in ((entry.token_id, entry.logprob), *reversed(entry.top))
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text; as in OpenAI's API, incomplete characters have the prefix ``bytes:``."""
        token_bytes = Spelling.of(self._tokenizer).bytes_of(token)
        name = _decode(token_bytes)
        return name if name.encode() == token_bytes else f"bytes:{name}"

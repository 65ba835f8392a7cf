"""Parts of answers that completions and chats share: usage, log-probabilities, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from paceline.server.records import Completion, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    """Token counts; a prompt counts once, however many completions it has."""
    written = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }


def speculation_stats(completion: Completion, drafter: str) -> dict[str, Any]:
    """How drafting went for one completion."""
    stats = completion.stats
    return {
        "drafter": drafter,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_per_position": stats.acceptance_per_position,
        "target_steps": stats.target_steps,
        "lossy": completion.lossy,
    }


def token_record(tokenizer: PreTrainedTokenizerFast, entry: TokenLogprob) -> dict[str, Any]:
    """A token and its alternatives, as chats report them."""
    return {
        **_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_token(tokenizer, token, value) for token, value in entry.top],
    }


def _token(tokenizer: PreTrainedTokenizerFast, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8"))}


def token_text(tokenizer: PreTrainedTokenizerFast, token: int) -> str:
    return str(tokenizer.decode([token]))


class Origins:
    """Where every token of one text came from, for as long as it grows.

    The texts of the tokens put together are the text: a token that ends inside a character has
    none, and the one that completes the character has all of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)

    def records(
        self,
        tokens: Sequence[int],
        from_draft: Sequence[bool],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> list[dict[str, Any]]:
        """Of the tokens that follow. ``draft_position`` counts from 0 in its step's draft.

        Drafted tokens of a step come first, so positions grow until the target's own token.
        """
        records: list[dict[str, Any]] = []
        position = 0
        for place, (token, drafted) in enumerate(zip(tokens, from_draft, strict=True)):
            records.append(
                {
                    "id": token,
                    "text": self._decoder.step(self._backend, token) or "",
                    "from_draft": drafted,
                    "draft_position": position if drafted else None,
                    "logprob": None if logprobs is None else finite(logprobs[place].logprob),
                }
            )
            position = position + 1 if drafted else 0
        return records


def finite(logprob: float) -> float:
    """JSON knows no infinity; OpenAI's API says -9999 for what cannot happen."""
    return max(logprob, -9999.0)


def completion_logprobs(
    tokenizer: PreTrainedTokenizerFast, entries: Sequence[TokenLogprob], start: int
) -> dict[str, Any]:
    """The columns of the completions API; ``start`` is the text's length before these tokens."""
    texts = [token_text(tokenizer, entry.token_id) for entry in entries]
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {token_text(tokenizer, token): finite(value) for token, value in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }

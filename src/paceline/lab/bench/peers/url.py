"""Any server of OpenAI's protocol: what it understands is found out before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from paceline.core.params import SamplingParams
from paceline.lab.bench.outcome import Ask
from paceline.lab.bench.peers.kinds import OwnSide, PeerDifferences, PeerFailedError
from paceline.lab.bench.peers.served import (
    Address,
    Delivery,
    PeerRefusedError,
    ServedPeer,
    events,
)

# What is asked for if the server takes it: prompts as ids, no end, ids and counts in the answer,
# and none of the sampling that a server may have by default.
_IDS, _NO_END, _TELL_IDS, _USAGE = "ids", "ignore_eos", "return_token_ids", "stream_options"
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_WANTED = (_IDS, _NO_END, _TELL_IDS, _USAGE, *_NEUTRAL)


@dataclass
class CompletionsDialect:
    """``/v1/completions``; ``takes`` are the wishes that the server does not refuse."""

    model: str
    own: OwnSide
    path: str = "/v1/completions"
    takes: set[str] = field(default_factory=set)

    def body(self, ask: Ask) -> dict[str, Any]:
        params = ask.params
        prompt: Any = list(ask.prompt)
        if _IDS not in self.takes:
            prompt = self.own.tokenizer.decode(ask.prompt)
        found = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
            "stream": True,
        }
        if params.seed is not None:
            found["seed"] = params.seed
        found |= {name: value for name, value in _NEUTRAL.items() if name in self.takes}
        if _NO_END in self.takes and params.ignore_eos:
            found[_NO_END] = True
        if _TELL_IDS in self.takes:
            found[_TELL_IDS] = True
        if _USAGE in self.takes:
            found[_USAGE] = {"include_usage": True}
        return found

    def delivery(self, event: Any) -> Delivery:
        usage = event.get("usage") or {}
        written, read = usage.get("completion_tokens"), usage.get("prompt_tokens")
        choices = event.get("choices") or [{}]
        ids = tuple(int(token) for token in choices[0].get("token_ids") or ())
        return Delivery(str(choices[0].get("text") or ""), ids, written, read)


def open_url(name: str, url: str, clients: int, own: OwnSide) -> ServedPeer:
    """The server at ``url``, and the first model that it lists. Raises PeerFailedError."""
    address = Address.of(url)
    try:
        listed = address.read("/v1/models")["data"]
        dialect = CompletionsDialect(str(listed[0]["id"]), own)
        _find_out(address, dialect)
    except PeerRefusedError as error:
        raise PeerFailedError(
            f"the server at {url} refuses completions ({error}); bench needs /v1/completions"
        ) from None
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise PeerFailedError(
            f"no server of OpenAI's protocol answers at {url} ({what}); start it first"
        ) from None
    return ServedPeer(name, address, dialect, clients, own, _differences(dialect))


def _find_out(address: Address, dialect: CompletionsDialect) -> None:
    """A short request without any wish, which must succeed, then one with each."""
    ids = tuple(dialect.own.tokenizer("Hello there")["input_ids"])
    ask = Ask(ids, SamplingParams(max_tokens=2, ignore_eos=True))

    def answered() -> bool:
        with address.ask(dialect.path, dialect.body(ask)) as response:
            return any(dialect.delivery(event).text for event in events(response))

    answered()
    for wish in _WANTED:
        dialect.takes.add(wish)
        try:
            answered()
        except (PeerRefusedError, ValueError, OSError, HTTPException):
            dialect.takes.discard(wish)


def _differences(dialect: CompletionsDialect) -> PeerDifferences:
    found = PeerDifferences(
        precision=f"unknown; here {dialect.own.precision}",
        cache="its own: later rounds may find their prompts there",
        threads="its own",
    )
    if _IDS not in dialect.takes:
        found.ids = "prompts sent as text, which its own tokenizer reads"
    if _NO_END not in dialect.takes:
        found.ignore_eos = "refused: it ends answers where the model does"
    return found

"""A server of OpenAI's protocol that makes its texts up, and may have one of several faults.

Its "model" is a fixed table: the distribution of the next word depends on the word before. So its
greedy texts, logprobs and samples are known, and each fault is one that a well-known engine has
shipped: biased sampling, logprobs that are all 0.0, a corrupted token now and then.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [" the", " cat", " dog", " saw", " a", " ball", " and", " ran", " home", "."]


@lru_cache
def chances(before: str) -> dict[str, float]:
    """Of the next word; far from even, and never a tie."""
    chance = random.Random(f"next {before}")
    weights = {word: math.exp(chance.gauss(0.0, 1.5)) for word in WORDS}
    total = sum(weights.values())
    return {word: weight / total for word, weight in weights.items()}


class PlantedServer:
    """``fault``: None, or one of FAULTS.

    ``logprobs``: "columns" as OpenAI's completions have them, "records" as its chats and llama.cpp
    have them, or None. ``cuts``: samples come from the three likeliest words unless ``top_k`` says
    otherwise.
    """

    def __init__(
        self,
        fault: str | None = None,
        seed: int = 7,
        logprobs: str | None = "columns",
        cuts: bool = False,
    ) -> None:
        self.fault, self.logprobs, self.cuts = fault, logprobs, cuts
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    # -- what it says ---------------------------------------------------------------------------

    def words(self, prompt: str, body: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
        """The words of one choice, each with the distribution that it is said to come from."""
        before = next((w for w in reversed(WORDS) if prompt.endswith(w)), prompt[-8:])
        found: list[tuple[str, dict[str, float]]] = []
        for place in range(body.get("max_tokens", 16)):
            own = chances(before)
            if body.get("temperature", 1.0):
                drawn = own
                if self.fault == "biased" and place:  # the first is the target's own
                    squared = {word: p**1.6 for word, p in own.items()}
                    drawn = {word: p / sum(squared.values()) for word, p in squared.items()}
                if self.cuts and body.get("top_k", 3) == 3:
                    drawn = dict(sorted(drawn.items(), key=lambda item: -item[1])[:3])
                word = self._chance.choices(list(drawn), list(drawn.values()))[0]
            else:
                word = max(own, key=own.__getitem__)
                if self.fault == "corrupt" and place % 7 == 5:
                    word = sorted(own, key=own.__getitem__)[1]
            found.append((word, own))
            before = word
        return found

    def choice(self, said: list[tuple[str, dict[str, float]]]) -> dict[str, Any]:
        tops = [dict(sorted(own.items(), key=lambda i: -i[1])[:5]) for _, own in said]
        value = (lambda p: 0.0) if self.fault == "zeros" else math.log
        names, values = [word for word, _ in said], [value(own[word]) for word, own in said]
        if self.fault == "bare":  # what was drafted is said without its chances
            drafted = [place % 5 in (2, 3) for place in range(len(said))]
            tops = [{} if own else top for own, top in zip(drafted, tops, strict=True)]
            values = [0.0 if own else v for own, v in zip(drafted, values, strict=True)]
        logprobs: dict[str, Any] = {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": [{w: value(p) for w, p in top.items()} for top in tops],
        }
        if self.logprobs == "records":
            likeliest = [[{"token": w, "logprob": value(p)} for w, p in t.items()] for t in tops]
            zipped = zip(names, values, likeliest, strict=True)
            fields = ("token", "logprob", "top_logprobs")
            logprobs = {"content": [dict(zip(fields, one, strict=True)) for one in zipped]}
        found = {"index": 0, "text": "".join(names), "finish_reason": "length"}
        return {**found, "logprobs": logprobs if self.logprobs else None}

    # -- the protocol ---------------------------------------------------------------------------

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            said = self.words(body["prompt"], body)
        usage = {"prompt_tokens": _length(body["prompt"]), "completion_tokens": len(said)}
        return {"choices": [self.choice(said)], "usage": usage}


FAULTS = {
    "biased": "sampling",
    "zeros": "logprobs",
    "bare": "logprobs",
    "corrupt": "greedy",
}


def _length(prompt: str) -> int:
    """Words of the table at its end count one each; what stands before counts as one."""
    count = 0
    while (found := next((w for w in WORDS if prompt.endswith(w)), None)) is not None:
        prompt, count = prompt.removesuffix(found), count + 1
    return count + 1


@contextmanager
def served(server: PlantedServer) -> Iterator[str]:
    """Its URL, while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "planted", "owned_by": "nobody"}]})

        def do_POST(self) -> None:
            self._send(
                server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )

        def _send(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()

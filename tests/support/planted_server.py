"""A server of OpenAI's protocol that makes its texts up, and may have one of several faults.

Its "model" is a fixed table: the distribution of the next word depends on the word before. So its
greedy texts, logprobs and samples are known, and each fault is one that a well-known engine has
shipped: biased sampling, logprobs that are all 0.0, a corrupted token now and then, lost deltas.
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
    have them, or None. ``strict``: no field that OpenAI's API has not, and one choice at a time.
    ``cuts``: samples come from the three likeliest words unless ``top_k`` says otherwise.
    """

    def __init__(
        self,
        fault: str | None = None,
        seed: int = 7,
        chats: bool = True,
        logprobs: str | None = "columns",
        strict: bool = False,
        cuts: bool = False,
    ) -> None:
        self.fault, self.chats, self.logprobs = fault, chats, logprobs
        self.strict, self.cuts = strict, cuts
        self.requests = 0
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    # -- what it says ---------------------------------------------------------------------------

    def words(self, prompt: str, body: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
        """The words of one choice, each with the distribution that it is said to come from."""
        before = next((w for w in reversed(WORDS) if prompt.endswith(w)), prompt[-8:])
        found: list[tuple[str, dict[str, float]]] = []
        counts = dict.fromkeys(WORDS, 0)
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
                penalty, once = (
                    body.get(f"{kind}_penalty", 0.0) for kind in ("frequency", "presence")
                )
                scores = {
                    w: math.log(p) - penalty * counts[w] - once * bool(counts[w])
                    for w, p in own.items()
                }
                word = max(scores, key=scores.__getitem__)
                if self.fault == "corrupt" and place % 7 == 5:
                    word = sorted(own, key=own.__getitem__)[1]
            found.append((word, own))
            counts[word] += self.fault != "unpenalised"
            before = word
        return found

    def choice(self, prompt: str, body: Mapping[str, Any], index: int) -> dict[str, Any]:
        said, reason = self.words(prompt, body), "length"
        for stop in body.get("stop") or ():
            text = "".join(word for word, _ in said)
            if stop in text:
                while stop in "".join(word for word, _ in said):
                    said.pop()
                left = text[len("".join(word for word, _ in said)) : text.index(stop)]
                reason = "stop"
                if self.fault == "deaf":
                    left += stop
                return self._choice(said, index, reason, left)
        return self._choice(said, index, reason)

    def _choice(
        self, said: list[tuple[str, dict[str, float]]], index: int, reason: str, more: str = ""
    ) -> dict[str, Any]:
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
        text = "".join(word for word, _ in said) + more
        found = {"index": index, "text": text, "finish_reason": reason}
        return {**found, "logprobs": logprobs if self.logprobs else None}

    # -- the protocol ---------------------------------------------------------------------------

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests += 1
            if path.endswith("chat/completions"):
                return self._chat(body)
            prompt = body["prompt"]
            if self.strict and ("top_k" in body or body.get("n", 1) > 1):
                return 400, {"error": {"message": "no such thing here"}}
            choices = [self.choice(prompt, body, i) for i in range(body.get("n", 1))]
        words = sum(len(choice["text"].replace(".", " .").split()) for choice in choices)
        usage = {"prompt_tokens": _length(prompt), "completion_tokens": words}
        return 200, {"choices": choices, "usage": usage}

    def _chat(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.chats:
            return 400, {"error": {"message": "no chats here"}}
        said = '{"name": "cat", "count": 2}'
        if self.fault == "unstructured":
            said = '{"name": "cat", "count": "two"}'
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if body.get("tools"):
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": "look_up", "arguments": said},
            }
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        _, answer = self.answer(path, body)
        (choice,) = answer["choices"]
        if "message" in choice:
            yield {"choices": [{"index": 0, "delta": choice["message"], "finish_reason": "stop"}]}
            return
        said = self.words(body["prompt"], body)
        for first in range(0, len(said), 3):  # three tokens a step
            part, last = said[first : first + 3], first + 3 >= len(said)
            if self.fault == "lost" and first == 6:
                part = part[:-1]
            own = self._choice(part, 0, "length")
            yield {"choices": [{**own, "finish_reason": "length" if last else None}]}
        usage = {**answer["usage"]}
        yield {"choices": [], "usage": usage}


FAULTS = {
    "biased": "sampling",
    "zeros": "logprobs",
    "bare": "logprobs",
    "corrupt": "greedy",
    "lost": "streams",
    "deaf": "limits",
    "unstructured": "structure",
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
            self._send(200, {"data": [{"id": "planted", "owned_by": "nobody"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not body.get("stream"):
                self._send(*server.answer(self.path, body))
                return
            status, answer = server.answer(self.path, body) if not server.chats else (200, {})
            if status != 200 and "chat" in self.path:
                self._send(status, answer)
                return
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in server.chunks(self.path, body)]
            self._write(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            self._write(status, json.dumps(answer).encode())

        def _write(self, status: int, data: bytes) -> None:
            self.send_response(status)
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

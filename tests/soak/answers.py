"""Answers in one form, whether they came whole or in chunks, so that they can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_TOLERANCE = 2e-3  # of log-probabilities: batches of other sizes round differently


@dataclass
class Choice:
    """One text with all that was said about it."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each
    reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: dict[str, Any], reason: str | None, logprobs: Any) -> None:
        """A whole message, or a delta of one."""
        self.text += part.get("text") or part.get("content") or ""
        for place, call in enumerate(part.get("tool_calls") or []):
            index = call.get("index", place)
            while len(self.calls) <= index:
                self.calls.append(["", ""])
            self.calls[index][0] += call["function"].get("name") or ""
            self.calls[index][1] += call["function"].get("arguments") or ""
        self.reason = reason or self.reason
        if logprobs:
            self.logprobs += entries(logprobs)


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @classmethod
    def of(cls, chunks: Iterable[dict[str, Any]]) -> Answer:
        """Of all chunks of a stream, or of the one body of a whole answer."""
        answer = cls()
        for chunk in chunks:
            answer.error = chunk.get("error") or answer.error
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", ()):
                part = choice.get("message") or choice.get("delta") or choice
                mine = answer.choices.setdefault(choice["index"], Choice())
                mine.add(part, choice["finish_reason"], choice["logprobs"])
        return answer

    @property
    def tokens(self) -> int:
        return self.usage["completion_tokens"] if self.usage else 0

    def difference(self, other: Answer) -> str | None:
        """What is not the same, or None. Usage counts only where both have it."""
        if self.error or other.error:
            return None if self.error == other.error else f"{self.error} against {other.error}"
        if self.choices.keys() != other.choices.keys():
            return f"choices {sorted(self.choices)} against {sorted(other.choices)}"
        for index, mine in sorted(self.choices.items()):
            theirs = other.choices[index]
            for name in ("text", "calls", "reason"):
                left, right = getattr(mine, name), getattr(theirs, name)
                if left != right:
                    return f"{name} of choice {index}: {left!r} against {right!r}"
            found = _other_logprobs(mine.logprobs, theirs.logprobs)
            if found:
                return f"logprobs of choice {index}: {found}"
        mine, theirs = _counted(self.usage), _counted(other.usage)
        if mine and theirs and mine != theirs:
            return f"usage {mine} against {theirs}"
        return None


def _counted(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Without the details: what was cached and what a prediction gave differ by right."""
    return {name: n for name, n in (usage or {}).items() if not name.endswith("_details")}


def entries(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of completions (columns) and those of chats (records) as records."""
    if "content" in logprobs:
        return [
            {
                "token": entry["token"],
                "bytes": entry["bytes"],
                "value": entry["logprob"],
                "tops": sorted(top["logprob"] for top in entry["top_logprobs"]),
            }
            for entry in logprobs["content"]
        ]
    columns = zip(
        logprobs["tokens"],
        logprobs["text_offset"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"],
        strict=True,
    )
    return [
        {
            "token": token,
            "offset": offset,
            "value": value or 0.0,  # of an echoed prompt's first token there is none
            "tops": sorted((tops or {}).values()),
        }
        for token, offset, value, tops in columns
    ]


def _other_logprobs(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> str | None:
    if len(left) != len(right):
        return f"{len(left)} tokens against {len(right)}"
    for place, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        for name in ("token", "bytes", "offset"):
            if mine.get(name) != theirs.get(name):
                return f"{name} {place}: {mine.get(name)!r} against {theirs.get(name)!r}"
        values = [[entry["value"], *entry["tops"]] for entry in (mine, theirs)]
        if len(values[0]) != len(values[1]) or any(
            not math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            for a, b in zip(*values, strict=True)
        ):
            return f"values of token {place}: {mine} against {theirs}"
    return None

"""Answers with tools, as they grow: what is text may go out, what may be a call must wait."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.engine.text import held_back
from paceline.server.protocol import Tool
from paceline.server.tool_calls import OPENINGS, TAGS, call_of, find_calls

Delta = dict[str, Any]


class AnswerStream(Protocol):
    """One choice of a streamed chat. Deltas are those of OpenAI's chunks."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """The last deltas, and the reason why the answer ended, of which calls are one."""
        ...


class TextAnswer:
    """An answer that cannot be a call."""

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        return [], reason


class ForcedCall:
    """An answer whose grammar makes it a call: name first, then the arguments as they come."""

    # The layout is the grammar's (grammar.py): JSON on one line.
    _HEAD = re.compile(r'\{"name": "([^"]+)", "arguments": ')

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0  # characters of _text, once the head is out

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        if not self._sent:
            head = self._HEAD.match(self._text)
            if head is None:
                return []
            self._sent = head.end()
            deltas.append({"tool_calls": [{"index": 0, **call_of(head[1], "")}]})
        # The last brace may be that of the call, not of its arguments.
        return deltas + self._arguments(len(self._text) - 1)

    def _arguments(self, end: int) -> list[Delta]:
        piece = self._text[self._sent : end]
        if not piece:
            return []
        self._sent = end
        return [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}]

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        if not self._sent:  # cut off before it had a name
            return ([{"content": self._text}] if self._text else []), reason
        whole = reason == "stop" and self._text.endswith("}")
        deltas = self._arguments(len(self._text) - whole)
        return deltas, "tool_calls" if whole else reason


class PossibleCall:
    """An answer that may be text, a call, or text and then a call."""

    def __init__(self, tools: Sequence[Tool], parallel: bool) -> None:
        self._tools, self._parallel = tools, parallel
        self._held = ""
        self._plain = False  # whether it has begun as text
        self._tagged = False

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        if self._tagged:
            return []
        if not self._plain:
            start = self._held.lstrip()
            if not start or any(o.startswith(start) or start.startswith(o) for o in OPENINGS):
                return []
            self._plain = True
        found = [self._held.find(tag) for tag in TAGS if tag in self._held]
        if found:
            self._tagged = True
            return self._release(min(found))
        return self._release(len(self._held) - held_back(self._held, TAGS))

    def _release(self, end: int) -> list[Delta]:
        piece, self._held = self._held[:end], self._held[end:]
        return [{"content": piece}] if piece else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        rest, calls = find_calls(self._held, self._tools)
        if not calls:
            return self._release(len(self._held)), reason
        calls = calls if self._parallel else calls[:1]
        deltas: list[Delta] = [{"content": rest}] if rest else []
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        return deltas, "tool_calls"

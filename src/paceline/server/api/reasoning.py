"""Separates what a model thinks from what it answers, by the marks of its chat template.

    <think>...</think> text              Qwen 3, DeepSeek, GLM, SmolLM3 and most others
    <seed:think>...</seed:think> text    Seed-OSS; [THINK] (Mistral); <|START_THINKING|> (Cohere)
    <|channel|>analysis<|message|>...    GPT-OSS (harmony), whose tool calls are messages as well

A template may begin the thoughts itself: then the answer has only their end mark.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from paceline.model.tokenizer import Tokenizer
from paceline.request.text import longest_overlap
from paceline.server.api.tools import THOUGHT, Delta, TextParser, new_tool_call

_MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_CHANNEL, _MESSAGE, _END = "<|channel|>", "<|message|>", "<|end|>"
_HARMONY_MARKS = (
    *(_CHANNEL, _MESSAGE, _END, "<|start|>"),
    *("<|constrain|>", "<|call|>", "<|return|>"),
)


@dataclass(frozen=True)
class Marks:
    """The texts around thoughts. ``special``: they are special tokens, which a text may lack."""

    begin: str
    end: str
    special: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks | None:
        """Those in the model's chat template; None if it has none."""
        template = str(tokenizer.chat_template or "")
        pairs = ((_CHANNEL, _END), *_MARKS)
        pair = next((pair for pair in pairs if all(mark in template for mark in pair)), None)
        if pair is None:
            return None
        added = tokenizer.added_tokens_decoder.values()
        return cls(*pair, any(token.special and token.content in pair for token in added))

    def parser(self, text: TextParser, prompt: str, functions: Set[str]) -> TextParser:
        """A parser for an answer to ``prompt``, which may call ``functions``; ``text`` parses what
        is not thought."""
        if self.begin == _CHANNEL:
            return HarmonyParser(functions)
        return ThoughtParser(text, self, prompt.rstrip().endswith(self.begin))


class ThoughtParser(TextParser):
    """Parses one run of thoughts, at the beginning of an answer, and the text after it. Whitespace
    around the marks is dropped."""

    def __init__(self, text: TextParser, marks: Marks, inside: bool) -> None:
        """``inside``: the prompt has begun the thoughts."""
        self._text, self._marks = text, marks
        self._buffer = ""  # text of which it is not known yet what it is
        self._inside: bool | None = inside or None  # None: nothing has come yet; False: text
        self._drops_space = inside  # a mark was the last that came

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        if self._inside is None:
            start = self._buffer.lstrip()
            if self._marks.begin.startswith(start):
                return []
            self._inside = self._drops_space = start.startswith(self._marks.begin)
            if self._inside:
                self._buffer = start.removeprefix(self._marks.begin)
        deltas: list[Delta] = []
        if self._inside and self._marks.end in self._buffer:
            thought, _, rest = self._buffer.partition(self._marks.end)
            self._buffer = thought.rstrip()
            deltas = _thought(self._take(len(self._buffer)))
            self._inside, self._drops_space, self._buffer = False, True, rest
        if not self._inside:
            return [*deltas, *self._text.feed(self._take(len(self._buffer)))]
        held = longest_overlap(self._buffer, (self._marks.end,))
        return _thought(self._take(len(self._buffer[: len(self._buffer) - held].rstrip())))

    def _take(self, length: int) -> str:
        """The first characters of the buffer, which lose the whitespace after a mark."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        text = text.lstrip() if self._drops_space else text
        self._drops_space = self._drops_space and not text
        return text

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        rest = self._take(len(self._buffer))
        deltas = _thought(rest) if self._inside else self._text.feed(rest)
        last, reason = self._text.finish(reason)
        return [*deltas, *last], reason


def _thought(text: str) -> list[Delta]:
    return [{THOUGHT: text}] if text else []


class HarmonyParser(TextParser):
    """Parses messages of OpenAI's harmony format: ``HEADER<|message|>TEXT<|end|>``. A header names
    a channel and, for a tool call, its recipient; calls of others than ``functions`` are thoughts.
    Text in front of all marks is content."""

    _MARK = re.compile("|".join(map(re.escape, _HARMONY_MARKS)))
    _RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")

    def __init__(self, functions: Set[str]) -> None:
        self._functions = functions
        self._buffer = self._header = ""
        self._in_header: bool | None = None  # None: nothing has come yet
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while mark := self._MARK.search(self._buffer):
            deltas += self._add(self._buffer[: mark.start()])
            self._buffer = self._buffer[mark.end() :]
            deltas += self._pass(mark[0])
        known = len(self._buffer) - longest_overlap(self._buffer, _HARMONY_MARKS)
        deltas += self._add(self._buffer[:known])
        self._buffer = self._buffer[known:]
        return deltas

    def _pass(self, mark: str) -> list[Delta]:
        """Go behind a mark; a call begins with the text of its message."""
        begins = mark == _MESSAGE
        self._header += " "
        if self._in_header is False and not begins:
            self._header = ""
        self._in_header = not begins
        recipient = self._RECIPIENT.search(self._header) if begins else None
        if recipient is None or recipient[1] not in self._functions:
            return []
        self._calls += 1
        call = new_tool_call(recipient[1], "")
        return [{"tool_calls": [{"index": self._calls - 1, **call}]}]

    def _add(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._in_header is None:  # the prompt has begun a header, which may name a recipient
            self._in_header = "to=".startswith(text.strip()[:3])
        if self._in_header:
            self._header += text
            return []
        recipient = self._RECIPIENT.search(self._header)
        if recipient is not None and recipient[1] in self._functions:
            return [{"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]}]
        thinks = recipient is not None or "analysis" in self._header
        return _thought(text) if thinks else [{"content": text}]

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        deltas = self._add(self._buffer)
        self._buffer = ""
        return deltas, "tool_calls" if self._calls and reason == "stop" else reason

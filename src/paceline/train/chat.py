"""Conversations in training data: their layouts, and what a chat template makes of them.

An answer begins in the written text where the turns before it, written with a prompt, end.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerFast

from paceline.train.records import RefusedError, unicode_text

ChatMessages = list[dict[str, Any]]

_TURN = re.compile(r"(?:\A|\n\n)(User|Assistant): ")
# Who speaks in ShareGPT's files and their descendants.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
# Fields of files that hold questions to several turns and no answers.
_QUESTIONS_ONLY = ("question_id", "category", "format")
_THOUGHT = "</think>"


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them; ``unlearnt`` numbers those not to be learnt, ``later``
    are questions to ask once the last message has been answered."""

    messages: ChatMessages
    tools: list[Any] | None = None
    unlearnt: frozenset[int] = frozenset()
    later: tuple[str, ...] = ()

    @property
    def answers(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def openings(self) -> list[int]:
        """How many messages stand before each answer, also one that is yet to be given."""
        before = [message["role"] for message in self.messages]
        asked = [] if before[-1] == "system" else [len(before)]
        return [k for k in self.answers + asked if k and before[k - 1] != "assistant"]


# -- layouts ---------------------------------------------------------------------------------------


def turns_of(text: str) -> ChatMessages:
    """The messages of a text of ``User: `` and ``Assistant: `` turns; [] for other text."""
    if not text.startswith(("User: ", "Assistant: ")):
        return []
    pieces = _TURN.split(text)  # ['', role, content, role, content, ...]
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": role.lower(), "content": content} for role, content in turns]


def conversation_of(record: dict[str, Any]) -> Conversation | None:
    """The conversation that a record holds; None if it holds text or ids. Raises RefusedError."""
    if record.get("ids") is not None:
        return None
    tools = record.get("tools")
    tools = tools if isinstance(tools, list) and tools else None
    if record.get("messages") is not None:
        items = _items(record["messages"], "messages")
        messages = [_message(item, turn) for turn, item in enumerate(items, 1)]
        unlearnt = (k for k, item in enumerate(items) if item.get("weight") == 0)
        return Conversation(messages, tools, frozenset(unlearnt))
    if record.get("conversations") is not None:
        items = _items(record["conversations"], "conversations")
        messages = [_said(item, turn) for turn, item in enumerate(items, 1)]
        opening = record.get("system")
        if isinstance(opening, str) and opening and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": opening})
        return Conversation(messages, tools)
    if record.get("turns") is not None:
        return _conversation_of_turns(record, tools)
    turns = turns_of(record["text"]) if isinstance(record.get("text"), str) else []
    return Conversation(turns) if turns else None


def _items(value: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"its {name} are not a list of objects")
    return value


def _message(item: dict[str, Any], number: int) -> dict[str, Any]:
    """One of OpenAI's messages, its content as text and the arguments of its calls as objects."""
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise RefusedError(f"message {number} has no role")
    role = "system" if role == "developer" else role
    message = {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}
    calls = item.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, number) for call in _items(calls, "tool_calls")]
    return {"role": role, "content": _content(item.get("content"), number, bool(calls)), **message}


def _content(value: object, number: int, calls: bool) -> str:
    if value is None and calls:
        return ""
    parts = value if isinstance(value, list) else [value]
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind not in (None, "text"):
            raise RefusedError(f"message {number} has a part of type {kind!r}; only text is read")
        texts.append(part.get("text") if isinstance(part, dict) else part)
    if not all(isinstance(text, str) for text in texts):
        raise RefusedError(f"message {number} has no content of text")
    return "".join(map(str, texts))


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RefusedError(f"message {number} calls no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # templates want an object; what is none stays text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _said(item: dict[str, Any], number: int) -> dict[str, Any]:
    """One of ShareGPT's turns."""
    speaker, words = item.get("from", item.get("role")), item.get("value", item.get("content"))
    role = _SPEAKERS.get(str(speaker).lower())
    if role is None:
        raise RefusedError(f"turn {number} is said by {speaker!r}; known are human, gpt and system")
    if not isinstance(words, str):
        raise RefusedError(f"turn {number} has no value of text")
    return {"role": role, "content": words}


def _conversation_of_turns(record: dict[str, Any], tools: list[Any] | None) -> Conversation:
    """Texts of user and assistant in turn, mere questions of a user, or objects."""
    turns = record["turns"]
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        if len(turns) == 1 or any(name in record for name in _QUESTIONS_ONLY):
            return Conversation([{"role": "user", "content": turns[0]}], later=tuple(turns[1:]))
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": turn} for k, turn in enumerate(turns)]
        return Conversation(messages)
    items = _items(turns, "turns")
    read = _said if "from" in items[0] else _message
    return Conversation([read(item, turn) for turn, item in enumerate(items, 1)], tools)


# -- writing ---------------------------------------------------------------------------------------


class ChatWriter:
    """Writes conversations with the chat template of one tokenizer's model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._end_tokens = tuple(token.content for token in added)
        self.searched = 0  # answers found by their words: the template rewrites earlier turns

    def write(self, talk: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and the characters of it that the assistant wrote.

        An answer goes up to and with its end token. Raises RefusedError.
        """
        whole = self._written(talk, len(talk.messages))
        spans: list[tuple[int, int]] = []
        for k in talk.answers:
            if k not in talk.unlearnt:
                spans.append(self._span(talk, k, whole, spans[-1][1] if spans else 0))
        return whole, spans

    def prompt_ids(self, talk: Conversation, count: int) -> list[int]:
        """The first ``count`` messages as the model sees them to answer. Raises RefusedError."""
        prompt = unicode_text(self._written(talk, count, ask=True))
        return list(self._tokenizer.encode(prompt, add_special_tokens=False))

    def _written(self, talk: Conversation, count: int, ask: bool = False) -> str:
        template = str(self._tokenizer.chat_template or "")
        if not template:
            raise RefusedError("the model has no chat template to write a conversation with")
        called = any("tool_calls" in message for message in talk.messages)
        if called and "tool_calls" not in template:
            raise RefusedError("it calls tools, which the model's chat template does not write")
        options: dict[str, Any] = {} if talk.tools is None else {"tools": talk.tools}
        try:
            written = self._tokenizer.apply_chat_template(
                talk.messages[:count], tokenize=False, add_generation_prompt=ask, **options
            )
        except Exception as error:  # jinja errors of any kind: the template refused the messages
            reason = " ".join(str(error).split())
            raise RefusedError(f"the chat template refused it: {reason}") from None
        return str(written)

    def _span(self, talk: Conversation, k: int, whole: str, floor: int) -> tuple[int, int]:
        """From where to where ``whole`` is what message ``k`` said."""
        content = talk.messages[k]["content"]
        before = self._written(talk, k, ask=True) if k else ""
        start = len(before)
        if not before or not whole.startswith(before):
            # What precedes an answer is written differently once there is one.
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
            start = self._find(whole, content, max(floor, sum(1 for _ in alike)))[0]
        ended = whole.startswith(content, start) and self._end_token(whole, start + len(content))
        if content and ended and "tool_calls" not in talk.messages[k]:
            return start, start + len(content) + len(ended)
        upto = whole if k == len(talk.messages) - 1 else self._written(talk, k + 1)
        if len(upto) > start and whole.startswith(upto):
            # A template writes blanks behind an end token, no model does.
            text = upto[start:].rstrip()
            return start, start + len(text) if text.endswith(self._end_tokens) else len(upto)
        self.searched += 1
        end = self._find(whole, content, start)[1]
        blanks = len(whole) - end - len(whole[end:].lstrip())
        end_token = self._end_token(whole, end + blanks)
        return start, end + blanks + len(end_token) if end_token else end

    def _end_token(self, whole: str, position: int) -> str:
        """The end token that stands at a position; "" if there is none."""
        standing = (token for token in self._end_tokens if whole.startswith(token, position))
        return max(standing, key=len, default="")

    def _find(self, whole: str, answer: str, first: int) -> tuple[int, int]:
        """Where an answer's words stand; templates may strip blanks and drop thoughts."""
        for words in (answer.strip(), answer.split(_THOUGHT)[-1].strip()):
            start = whole.find(words, first)
            if start >= 0:
                return start, start + len(words)
        raise RefusedError("the chat template rewrites an answer so that it is not found again")

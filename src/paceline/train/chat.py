"""Conversations in training data: the layouts they come in, and what a chat template makes of them.

What an assistant said is found in the written text by writing its beginnings: all turns before an
answer with the prompt for one must begin the whole, and what follows is the answer.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerFast

from paceline.train.records import RefusedError
from paceline.train.tokenizer import END_OF_TURN, ROLE_TOKENS

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
    """Messages as chat templates take them; ``unlearnt`` numbers those not to be learnt."""

    messages: ChatMessages
    tools: list[Any] | None = None
    unlearnt: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclass(frozen=True)
class Questions:
    """What a user would send: ``messages`` to answer, then further questions in turn."""

    messages: ChatMessages
    later: tuple[str, ...] = ()
    tools: list[Any] | None = None


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
        return Conversation(_turns(record), tools)
    turns = turns_of(record["text"]) if isinstance(record["text"], str) else []
    return Conversation(turns) if turns else None


def questions_of(record: dict[str, Any]) -> Questions | None:
    """What is to be answered in a conversation; None for other records. Raises RefusedError."""
    turns = record.get("turns")
    if _are_texts(turns) and _holds_questions(record):
        return Questions([{"role": "user", "content": turns[0]}], tuple(turns[1:]))
    talk = conversation_of(record)
    if talk is None:
        return None
    messages = list(talk.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        raise RefusedError("it has no message of a user to answer")
    return Questions(messages, (), talk.tools)


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


def _are_texts(turns: Any) -> TypeGuard[list[str]]:
    return isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)


def _holds_questions(record: dict[str, Any]) -> bool:
    return len(record["turns"]) == 1 or any(name in record for name in _QUESTIONS_ONLY)


def _turns(record: dict[str, Any]) -> ChatMessages:
    """Texts of user and assistant in turn, or objects. Raises RefusedError for mere questions."""
    turns = record["turns"]
    if _are_texts(turns):
        if _holds_questions(record):
            raise RefusedError(
                "its turns are questions without answers; paceline train sample has them answered"
            )
        roles = ("user", "assistant")
        return [{"role": roles[k % 2], "content": turn} for k, turn in enumerate(turns)]
    items = _items(turns, "turns")
    shared = bool(items) and "from" in items[0]
    return [(_said if shared else _message)(item, k) for k, item in enumerate(items, 1)]


# -- writing ---------------------------------------------------------------------------------------


def has_our_roles(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether conversations are written with the tokens of our own chat format."""
    known = tokenizer.backend_tokenizer.token_to_id
    return all(known(token) is not None for token in ROLE_TOKENS.values())


def in_our_format(messages: ChatMessages) -> tuple[str, list[tuple[int, int]]]:
    """``<|user|>question<|end|><|assistant|>answer<|end|>`` and, for each message, the characters
    between its role and the next. Raises RefusedError for a role that has no token."""
    text, places = "", []
    for message in messages:
        opening = ROLE_TOKENS.get(message["role"])
        if opening is None:
            raise RefusedError(f"the model's chat format has no role {message['role']!r}")
        start = len(text) + len(opening)
        text += f"{opening}{message['content']}{END_OF_TURN}"
        places.append((start, len(text)))
    return text, places


@dataclass
class ChatWriter:
    """Writes conversations in the chat format of one tokenizer's model."""

    tokenizer: PreTrainedTokenizerFast
    searched: int = 0  # answers found by their words, because the template rewrites earlier turns
    _own: bool = field(init=False)
    _marks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._own = has_our_roles(self.tokenizer)
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._marks = tuple(token.content for token in added)

    def write(self, talk: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and the characters of it that the assistant wrote.

        An answer goes up to and with its end token. Raises RefusedError.
        """
        self._check(talk)
        if self._own:
            text, places = in_our_format(talk.messages)
            return text, [places[k] for k in talk.answers if k not in talk.unlearnt]
        whole = self._written(talk, len(talk.messages))
        spans: list[tuple[int, int]] = []
        for k in talk.answers:
            if k not in talk.unlearnt:
                spans.append(self._span(talk, k, whole, spans[-1][1] if spans else 0))
        return whole, spans

    def prompt(self, messages: ChatMessages, tools: list[Any] | None = None) -> str:
        """A conversation as the model sees it when it is to answer. Raises RefusedError."""
        talk = Conversation(messages, tools)
        self._check(talk)
        if self._own:
            return in_our_format(messages)[0] + ROLE_TOKENS["assistant"]
        return self._written(talk, len(messages), ask=True)

    def _check(self, talk: Conversation) -> None:
        if not self._own and not self.tokenizer.chat_template:
            raise RefusedError("the model has no chat template to write a conversation with")
        called = any("tool_calls" in message for message in talk.messages)
        if called and "tool_calls" not in str(self.tokenizer.chat_template):
            raise RefusedError("it calls tools, which the model's chat template does not write")

    def _written(self, talk: Conversation, count: int, ask: bool = False) -> str:
        options: dict[str, Any] = {} if talk.tools is None else {"tools": talk.tools}
        try:
            written = self.tokenizer.apply_chat_template(
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
        if before and whole.startswith(before):
            start = len(before)
        else:  # what precedes an answer is written differently once there is one
            common = max(floor, _common(before, whole))
            start = self._place(whole, content, common)[0]
        if k == len(talk.messages) - 1:
            return start, self._without_blanks(whole, start, len(whole))
        ended = whole.startswith(content, start) and self._mark(whole, start + len(content))
        if content and ended and "tool_calls" not in talk.messages[k]:
            return start, self._end(whole, start + len(content))
        upto = self._written(talk, k + 1)
        if len(upto) > start and whole.startswith(upto):
            return start, self._without_blanks(whole, start, len(upto))
        self.searched += 1
        return start, self._end(whole, self._place(whole, content, start)[1])

    def _mark(self, whole: str, position: int) -> str:
        """The end token that stands at a position; "" if there is none."""
        return max((m for m in self._marks if whole.startswith(m, position)), key=len, default="")

    def _end(self, whole: str, position: int) -> int:
        """Where an answer whose words end at ``position`` ends: behind its end token."""
        blanks = len(whole) - position - len(whole[position:].lstrip())
        mark = self._mark(whole, position + blanks)
        return position + blanks + len(mark) if mark else position

    def _place(self, whole: str, answer: str, first: int) -> tuple[int, int]:
        """Where an answer's words stand; templates may strip blanks and drop thoughts."""
        for words in (answer.strip(), answer.split(_THOUGHT)[-1].strip()):
            start = whole.find(words, first)
            if start >= 0:
                return start, start + len(words)
        raise RefusedError("the chat template rewrites an answer so that it is not found again")

    def _without_blanks(self, whole: str, start: int, end: int) -> int:
        """An end without the blanks behind an end token: a template writes them, no model does."""
        text = whole[start:end].rstrip()
        return start + len(text) if text.endswith(self._marks) else end


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def own_text(record: dict[str, Any]) -> str:
    """A record in our own chat format, for a tokenizer that is yet to be trained; "" for what
    cannot be written so."""
    try:
        talk = conversation_of(record)
        if talk is not None:
            return in_our_format(talk.messages)[0]
    except RefusedError:
        return ""
    text = record.get("text")
    return text if isinstance(text, str) else ""

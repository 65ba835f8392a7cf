"""Conversations in training data: their layouts, and what a chat template makes of them.

To find an answer in a rendered conversation, the turns before it are rendered with a generation
prompt: the answer begins where that text ends."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerFast

from paceline.train.records import FORMS, RecordError, checked_text

ChatMessages = list[dict[str, Any]]

_TURN = re.compile(r"(?:\A|\n\n)(User|Assistant): ")
# The roles in files in the format of ShareGPT and its derivatives.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
# Records with one of these fields have questions of several turns, but no answers.
_QUESTIONS_ONLY = ("question_id", "category", "format")
_END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class Conversation:
    """Messages in the format of chat templates. ``excluded_turns`` are the indices of messages that
    are not trained on."""

    messages: ChatMessages
    tools: list[Any] | None = None
    excluded_turns: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def answer_positions(self) -> list[int]:
        """The number of messages before each answer, including one that is missing at the end."""
        roles = [message["role"] for message in self.messages]
        unanswered = [] if roles[-1] == "system" else [len(roles)]
        return [k for k in self.answers + unanswered if k and roles[k - 1] != "assistant"]


def parse_turns(text: str) -> ChatMessages:
    """The messages of a text with ``User: `` and ``Assistant: `` turns; [] for other text."""
    if not text.startswith(("User: ", "Assistant: ")):
        return []
    pieces = _TURN.split(text)  # ['', role, content, role, content, ...]
    turns = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": role.lower(), "content": content} for role, content in turns]


def conversation_from_record(record: dict[str, Any]) -> Conversation | None:
    """The conversation of a record; None if it has text or token ids. Raises RecordError."""
    form = next(name for name in FORMS if record.get(name) is not None)
    content = record[form]
    if form == "ids":
        return None
    if form == "text":
        turns = parse_turns(content) if isinstance(content, str) else []
        return Conversation(turns) if turns else None
    if form == "turns" and isinstance(content, list) and all(isinstance(s, str) for s in content):
        return _conversation_of_texts(record, content)
    tools, items = record.get("tools"), _objects(content, form)
    messages = [_message(item, number) for number, item in enumerate(items, 1)]
    opening = record.get("system") if form == "conversations" else None
    if isinstance(opening, str) and opening and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": opening})
    first = len(messages) - len(items)
    excluded = (k for k, item in enumerate(items, first) if item.get("weight") == 0)
    tools = tools if isinstance(tools, list) and tools else None
    return Conversation(messages, tools, frozenset(excluded))


def _conversation_of_texts(record: dict[str, Any], texts: list[str]) -> Conversation:
    """The conversation of alternating texts of user and assistant, or the first of questions."""
    if any(name in record for name in _QUESTIONS_ONLY):
        texts = texts[:1]
    roles = ("user", "assistant")
    return Conversation([{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)])


def _objects(value: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RecordError(f"its {name} are not a list of objects")
    return value


def _message(item: dict[str, Any], number: int) -> dict[str, Any]:
    """The message for chat templates, with content as text and arguments of calls as objects, of
    one in OpenAI's format or, with ``from`` and ``value``, ShareGPT's."""
    role = item.get("role")
    if "from" in item:
        role = _SPEAKERS.get(str(item["from"]).lower())
        if role is None:
            speaker = f"message {number} is from {item['from']!r}"
            raise RecordError(f"{speaker}; it must be from human, gpt or system")
    if not isinstance(role, str) or not role:
        raise RecordError(f"message {number} has no role")
    role = "system" if role == "developer" else role
    message = {key: item[key] for key in ("name", "tool_call_id") if item.get(key) is not None}
    if calls := item.get("tool_calls"):
        message["tool_calls"] = [_call(call, number) for call in _objects(calls, "tool_calls")]
    content = item.get("value", item.get("content"))
    text = "" if calls and content is None else _text(content, number)
    return {"role": role, "content": text, **message}


def _text(content: object, number: int) -> str:
    texts: list[str] = []
    for item in content if isinstance(content, list) else [content]:
        part = item if isinstance(item, dict) else {"text": item}
        if (kind := part.get("type", "text")) != "text":
            raise RecordError(f"message {number} has a part of type {kind!r}; only text is used")
        if not isinstance(text := part.get("text"), str):
            raise RecordError(f"message {number} has no text as content")
        texts.append(text)
    return "".join(texts)


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RecordError(f"message {number} calls no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # templates expect an object; text that is not JSON is kept
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


class ChatWriter:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self._end_tokens = tuple(token.content for token in added)
        # The number of answers that had to be searched for in the rendered text, because the
        # template rewrites earlier turns.
        self.searched = 0

    def write(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; returns the text and the spans of characters that are answers,
        including their end tokens. Raises RecordError."""
        whole = self._written(conversation, len(conversation.messages))
        spans: list[tuple[int, int]] = []
        for k in conversation.answers:
            if k not in conversation.excluded_turns:
                spans.append(self._span(conversation, k, whole, spans[-1][1] if spans else 0))
        return whole, spans

    def prompt_ids(self, conversation: Conversation, count: int) -> list[int]:
        """Token ids of ``count`` messages with a generation prompt. Raises RecordError."""
        prompt = checked_text(self._written(conversation, count, ask=True))
        return list(self._tokenizer.encode(prompt, add_special_tokens=False))

    def _written(self, conversation: Conversation, count: int, ask: bool = False) -> str:
        template = str(self._tokenizer.chat_template or "")
        if not template:
            raise RecordError("the model has no chat template to write a conversation with")
        called = any("tool_calls" in message for message in conversation.messages)
        if called and "tool_calls" not in template:
            raise RecordError("it calls tools, which the model's chat template does not write")
        tools: Any = conversation.tools
        try:
            written = self._tokenizer.apply_chat_template(
                conversation.messages[:count], tools, tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # jinja errors of any kind: the template refused the messages
            reason = " ".join(str(error).split())
            raise RecordError(f"the chat template refused it: {reason}") from None
        return str(written)

    def _span(self, conversation: Conversation, k: int, whole: str, floor: int) -> tuple[int, int]:
        """The span of message ``k`` in ``whole``, at or after ``floor``. Raises RecordError."""
        content = conversation.messages[k]["content"]
        before = self._written(conversation, k, ask=True) if k else ""
        start = len(before)
        if not before or not whole.startswith(before):
            # The template renders earlier turns differently once there are later ones.
            common = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
            start = self._find(whole, content, max(floor, sum(1 for _ in common)))[0]
        ended = whole.startswith(content, start) and self._end_token(whole, start + len(content))
        if content and ended and "tool_calls" not in conversation.messages[k]:
            return start, start + len(content) + len(ended)
        upto = whole if k == len(conversation.messages) - 1 else self._written(conversation, k + 1)
        if len(upto) > start and whole.startswith(upto):
            # Templates may append whitespace to the end token, which the model does not generate.
            text = upto[start:].rstrip()
            return start, start + len(text) if text.endswith(self._end_tokens) else len(upto)
        self.searched += 1
        end = self._find(whole, content, start)[1]
        blanks = len(whole) - end - len(whole[end:].lstrip())
        end_token = self._end_token(whole, end + blanks)
        return start, end + blanks + len(end_token) if end_token else end

    def _end_token(self, whole: str, position: int) -> str:
        """The longest added token at a position of the text; "" if there is none."""
        matching = (token for token in self._end_tokens if whole.startswith(token, position))
        return max(matching, key=len, default="")

    def _find(self, whole: str, answer: str, first: int) -> tuple[int, int]:
        """Where an answer is in the text from ``first`` on. Templates may strip whitespace and
        remove the reasoning. Raises RecordError."""
        for text in (answer.strip(), answer.split(_END_OF_REASONING)[-1].strip()):
            start = whole.find(text, first)
            if start >= 0:
                return start, start + len(text)
        raise RecordError("the chat template changes an answer so that it cannot be found")

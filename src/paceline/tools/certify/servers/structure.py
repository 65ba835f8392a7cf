"""Structured output and tool calls: what a server promises about the form of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.tools.certify.servers.answers import ServerRefusedError
from paceline.tools.certify.servers.asking import CheckPart

_KINDS = {"name": str, "count": int}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_TOOL = "look_up"
_FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
        }
    },
    "tool call": {
        "tools": [{"type": "function", "function": {"name": _TOOL, "parameters": _SCHEMA}}],
        "tool_choice": "required",  # of the one that there is; more servers know it than its name
    },
}


@dataclass
class StructurePart(CheckPart):
    """Answers under a schema, whole and streamed, are of its form; so are a tool's arguments."""

    name: str = "structure"
    unit: str = "answers"
    turn: int = 0

    def look(self, name: str, prompt: str) -> None:
        form = list(_FORMS)[self.turn % len(_FORMS)]
        self.turn += 1
        body = {
            "messages": [{"role": "user", "content": prompt}],
            **{"temperature": 0, "max_tokens": 120},
            **_FORMS[form],
        }
        asking, path = self.asking, "chat/completions"
        try:
            answer = asking.whole(asking.server, path, body)
            asking.count()
            chunks = asking.server.stream(path, body)
        except ServerRefusedError as error:
            self.note(f"{form} was not looked at: the server says {error}")
            return
        whole = [(choice["message"], choice.get("finish_reason")) for choice in answer["choices"]]
        deltas = [
            (choice.get("delta") or {}, choice.get("finish_reason"))
            for chunk in chunks
            for choice in chunk.get("choices") or ()
        ]
        texts = []
        for how, parts in (("", whole), (", streamed", deltas)):
            said, reason = _joined(form, parts)
            texts.append(said)
            self.looked_at += 1
            if reason == "length":
                continue  # cut off before its end
            wrong = _wrong(said)
            if wrong is not None:
                self.problems.append(f"{name}: {form}{how}: {wrong}: {said[:60]!r}")
        if texts[0] != texts[1]:
            again = asking.whole(asking.server, path, body)
            said, _ = _joined(form, [(choice["message"], None) for choice in again["choices"]])
            if said == texts[0]:
                self.problems.append(f"{name}: {form}: stream and whole answer differ")


def _joined(form: str, parts: list[tuple[dict[str, Any], str | None]]) -> tuple[str, str | None]:
    """Content, or the arguments of the first tool call, and how the answer ended."""
    text, reason = "", None
    for message, ended in parts:
        reason = ended or reason
        if form == "json_schema":
            text += message.get("content") or ""
        for call in (message.get("tool_calls") or ())[:1]:
            text += (call.get("function") or {}).get("arguments") or ""
    return text, reason


def _wrong(text: str) -> str | None:
    """Why a text is not of the schema, None if it is."""
    try:
        found = json.loads(text)
    except ValueError:
        return "no JSON"
    if not isinstance(found, dict) or found.keys() != _KINDS.keys():
        return "other keys than the schema's"
    if not all(type(found[key]) is kind for key, kind in _KINDS.items()):
        return "values of other types than the schema's"
    return "a name longer than the schema allows" if len(found["name"]) > 12 else None

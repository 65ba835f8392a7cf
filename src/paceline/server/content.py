"""What a message says, as one text: clients send a string, or parts of several kinds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

# Kinds of parts, and the field that has the text.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_OTHERS = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
    "document": "documents",
}
# A model's thoughts, when they come back among the parts of its answer.
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


def text_of(content: Any) -> str | None:
    """The text of a message's content. Raises ValueError, in one sentence, on what is none.

    Other fields of a part say where its text came from (annotations, log-probabilities) or how
    long to keep it (``cache_control``); they do not change it.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("give a text, or a list of parts of type 'text'")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in THOUGHTS:
        return ""
    if kind in _OTHERS:
        raise ValueError(
            f"{_OTHERS[kind]} are not supported; send text".replace("audio are", "audio is")
        )
    if not isinstance(kind, str) or kind not in _TEXTS:
        shown = f"of type {kind!r:.40} is" if isinstance(kind, str) else "without a type is"
        raise ValueError(f"a part {shown} not supported; send parts of type 'text'")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind!r} has no {_TEXTS[kind]!r}")
    return text


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    BeforeValidator(text_of),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]

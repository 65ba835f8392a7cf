"""Fields of request bodies: known, noted, ignored or refused; and the text of a message's content.

Fields that cannot change the text are noted (``requestlog.note``), as are fields of other servers
at neutral values. Unknown fields that are null are ignored. All others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from paceline.server.requestlog import note

# Noted at any value: storage, billing, routing, and what only OpenAI's and Anthropic's servers do.
NOTED = {
    *("betas", "cache_control", "cache_prompt", "cache_salt", "client_metadata"),
    *("context_management", "guided_decoding_backend", "include_obfuscation", "inference_geo"),
    *("max_tool_calls", "metadata", "mm_processor_kwargs", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"),
    *("session_id", "session_params", "speed", "store", "user", "user_id"),
}
# Noted at these neutral values.
NOTED_AT: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "bad_words": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 0),
    "logits_processors": ([],),
    "mcp_servers": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "top_a": (0,),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": ({},),
}
# Reasons for refusing; other unknown fields are refused by name alone.
REFUSED: Mapping[str, str] = {
    "audio": "answers are text; audio is not supported",
    "background": "answers are not made in the background; stream it",
    "bad_words": "words cannot be banned; use logit_bias for tokens",
    "container": "there are no containers here",
    "conversation": "conversations are not kept; use previous_response_id, or send the input again",
    "documents": "documents are not supported; put their text into a message",
    "draft_length": 'write "speculation": {"draft_length": ...}',
    "drafter": 'write "speculation": {"drafter": ...}',
    "guided_whitespace_pattern": "JSON is written on one line, which cannot be changed",
    "logits_processors": "code from requests is not run; use logit_bias or a grammar",
    "mcp_servers": "MCP servers are not called from here; offer their tools as functions",
    "modalities": 'answers are text; only ["text"] is supported',
    "prompt": "prompt templates are not kept here; send the messages",
    "return_tokens_as_token_ids": "not supported; return_token_ids adds the ids",
    "structural_tag": "structural tags are not supported; use json, regex, choice or grammar",
    "truncation": 'nothing is left out of a prompt; use "disabled"',
    "use_beam_search": "beam search is not supported; sample n answers",
    "web_search_options": "there is no web search here",
}
# Neutral values that vllm-router writes into every request.
ROUTER_DEFAULTS: Mapping[str, bool] = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}


class Body(BaseModel):
    """Part of a request. A null for a field that is not nullable is as good as left out."""

    model_config = ConfigDict(extra="forbid")
    _ignored: ClassVar[frozenset[str]] = frozenset()  # ignored

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _fields(cls)
        kept = {}
        for name, value in data.items():
            if name in known:
                if value is not None or known[name]:
                    kept[name] = value
            elif name in cls._ignored or value is None or value is ROUTER_DEFAULTS.get(name):
                pass
            elif name in NOTED or value in NOTED_AT.get(name, ()):
                note(name)
            else:
                kept[name] = value
        return kept


@cache
def _fields(kind: type[Body]) -> dict[str, bool]:
    """JSON names of the fields, and whether they are nullable."""
    return {
        field.alias or name: NoneType in get_args(field.annotation)
        for name, field in kind.model_fields.items()
    }


@cache
def known_fields() -> set[str]:
    """The names of all fields of all requests and their parts, for suggestions."""

    def of(kind: type[Body]) -> set[str]:
        return set(_fields(kind)).union(*map(of, kind.__subclasses__()))

    return of(Body)


# Types of parts that are text, and of a model's thoughts that are sent back.
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


def text_of(content: Any) -> str | None:
    """Of a message's content; other fields of its parts change nothing. Raises ValueError."""
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
    if not isinstance(kind, str) or kind not in _TEXTS:
        shown = f"of type {kind!r:.40}" if isinstance(kind, str) else "without a type"
        raise ValueError(f"a part {shown} is not supported; send parts of type 'text'")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise ValueError(f"a part of type {kind!r} has no {name!r}")
    return str(part[name])


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[_TextPart])]

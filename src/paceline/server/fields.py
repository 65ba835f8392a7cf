"""Which fields of request bodies are accepted, ignored or refused; the content of messages.

Fields that cannot change the text, and fields of other servers at neutral values, are ignored, and
the response names them (``requestlog.report_ignored``). Unknown fields that are null are dropped
silently. All other unknown fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from paceline.files import read_toml
from paceline.request.validation import text_of
from paceline.server.requestlog import report_ignored

_TABLES = read_toml(Path(__file__).with_name("fields.toml"), "the table of fields")
IGNORED = frozenset[str](_TABLES["ignored"])  # at any value
IGNORED_AT: Mapping[str, Sequence[Any]] = _TABLES["ignored_at"]  # at these neutral values
REFUSED: Mapping[str, str] = _TABLES["refused"]  # with the reason
ROUTER_DEFAULTS: Mapping[str, bool] = _TABLES["router_defaults"]  # in every request of vllm-router


class Body(BaseModel):
    """A JSON object of a request. Null stands for the default of a field that is not nullable.
    Fields in ``_dropped`` are ignored silently."""

    model_config = ConfigDict(extra="forbid")
    _dropped: ClassVar[frozenset[str]] = frozenset()

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
            elif name in cls._dropped or value is None or value is ROUTER_DEFAULTS.get(name):
                pass
            elif name in IGNORED or value in IGNORED_AT.get(name, ()):
                report_ignored(name)
            else:
                kept[name] = value
        return kept


@cache
def _fields(kind: type[Body]) -> dict[str, bool]:
    """Whether each field is nullable, by its name in JSON."""
    return {
        field.alias or name: NoneType in get_args(field.annotation)
        for name, field in kind.model_fields.items()
    }


@cache
def known_fields() -> set[str]:
    """The names of all fields of all request bodies, for suggestions."""

    def of(kind: type[Body]) -> set[str]:
        return set(_fields(kind)).union(*map(of, kind.__subclasses__()))

    return of(Body)


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[_TextPart])]

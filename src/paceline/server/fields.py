"""Which fields of request bodies are accepted, ignored or refused; the content of messages.

Fields that cannot change the text, fields of other servers at neutral values, and unknown fields
that are null are ignored. All other unknown fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from paceline.files import read_toml
from paceline.request.validation import text_of

_TABLES = read_toml(Path(__file__).with_name("fields.toml"), "the table of fields")
IGNORED = frozenset[str](_TABLES["ignored"])  # at any value
IGNORED_AT: Mapping[str, Sequence[Any]] = _TABLES["ignored_at"]  # at these neutral values
REFUSED: Mapping[str, str] = _TABLES["refused"]  # with the reason


class Body(BaseModel):
    """A JSON object of a request. Null stands for the default of a field that is not nullable."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _fields(cls)

        def is_kept(name: str, value: Any) -> bool:
            if name in known:
                return value is not None or known[name]
            return not (value is None or name in IGNORED or value in IGNORED_AT.get(name, ()))

        return {name: value for name, value in data.items() if is_kept(name, value)}


@cache
def _fields(kind: type[Body]) -> dict[str, bool]:
    """Whether each field is nullable, by its name in JSON."""
    return {
        field.alias or name: NoneType in get_args(field.annotation)
        for name, field in kind.model_fields.items()
    }


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[_TextPart])]

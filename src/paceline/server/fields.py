"""Fields of request bodies: known, noted, ignored or refused; and the text of a message's content.

Fields that cannot change the text are noted (``requestlog.note``), as are fields of other servers
at neutral values. Unknown fields that are null are ignored. All others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from paceline.files import read_toml
from paceline.request.validation import text_of
from paceline.server.requestlog import note

_TABLES = read_toml(Path(__file__).with_name("fields.toml"), "the table of fields")
NOTED = frozenset[str](_TABLES["noted"])  # at any value
NOTED_AT: Mapping[str, Sequence[Any]] = _TABLES["noted_at"]  # these neutral values
REFUSED: Mapping[str, str] = _TABLES["refused"]  # reasons; others are refused by name alone
ROUTER_DEFAULTS: Mapping[str, bool] = _TABLES["router_defaults"]  # in every request of vllm-router


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


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[_TextPart])]

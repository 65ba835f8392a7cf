"""Keywords of other engines: mapped to ours, or refused with what to do here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec, TypeVar

from paceline.errors import ConfigError
from paceline.files import read_toml

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TABLES = read_toml(Path(__file__).with_name("keywords.toml"), "the table of keywords")
# Keywords of other engines: our name, or (not a name) what to do.
OTHER_NAMES: dict[str, str] = _TABLES["ours"] | _TABLES["instead"]


def forgiving(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Have a function take the keywords of ``OTHER_NAMES``, too. ``what`` is its name in errors:
    ConfigError for a keyword that it does not know, with the nearest that it does."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = [name for name in signature(function).parameters if name != "self"]

        @wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
            for name in [name for name in keywords if name not in known]:
                ours = OTHER_NAMES.get(name, "")
                if ours not in known:
                    raise ConfigError(f"{what} has no keyword {name}; {_advice(name, known)}")
                if ours in keywords:
                    raise ConfigError(f"{what}: {name} is {ours} here; give it once")
                keywords[ours] = keywords.pop(name)
            return function(*args, **keywords)

        return call

    return decorate


def _advice(name: str, known: Iterable[str]) -> str:
    advice = OTHER_NAMES.get(name, "")
    if " " in advice:
        return advice
    return did_you_mean(name, known, f"it knows {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """The nearest of the ``known`` names as advice; ``otherwise`` where none is as like."""
    near = get_close_matches(name, known, 1, likeness)
    return f"did you mean {near[0]}?" if near else otherwise

"""Other names of settings: those of other engines, and ours of another place or of before. Each is
mapped to the one name here, or answered with what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.stages import warn
from paceline.errors import ConfigError
from paceline.files import read_toml

_Made = TypeVar("_Made", bound=Callable[..., Any])

# By section: what each name is here, one name or several, or (with spaces) what to do.
TABLES: dict[str, dict[str, str | list[str]]] = read_toml(
    Path(__file__).with_name("keywords.toml"), "the table of keywords"
)
_told = set[str]()


def our_name(name: str, known: Collection[str]) -> str:
    """What ``name`` is called where the ``known`` names are; else what to do, a text with spaces;
    else ""."""
    for table in TABLES.values():
        listed = table.get(name, [])
        for ours in [listed] if isinstance(listed, str) else listed:
            if ours in known or " " in ours:
                return ours
    return ""


def forgiving(what: str) -> Callable[[_Made], _Made]:
    """Have a function or class take other names of its keywords, too; each is told once. ``what``
    is its name in errors: ConfigError for a keyword it does not know, with the nearest it does."""

    def decorate(function: _Made) -> _Made:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        parameters = [*signature(function).parameters]
        known = [name for name in parameters if name != "self"]

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in [name for name in keywords if name not in known]:
                ours = our_name(name, known)
                if ours not in known:
                    advice = ours or did_you_mean(name, known, f"it knows {', '.join(known)}")
                    raise ConfigError(f"{what} has no keyword {name}; {advice}")
                announce(what, name, ours, ours in keywords or ours in parameters[: len(args)])
                keywords[ours] = keywords.pop(name)
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def announce(what: str, name: str, ours: str, twice: bool) -> None:
    """Say what a name of ``what`` is here, once; ConfigError if ours is given, too."""
    line = f"{what}: {name} is {ours} here"
    if twice:
        raise ConfigError(f"{line}; give it once")
    if line not in _told:
        _told.add(line)
        warn(f"note: {line}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """The nearest of the ``known`` names as advice; ``otherwise`` where none is as like."""
    near = get_close_matches(name, known, 1, likeness)
    return f"did you mean {near[0]}?" if near else otherwise

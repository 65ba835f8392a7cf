"""Other names of settings: those of other engines, and former names or names of other places of our
own. Each is mapped to its name here, or answered with advice."""

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

# By section and foreign name: our name, several names, or advice (a text with spaces).
TABLES: dict[str, dict[str, str | list[str]]] = read_toml(
    Path(__file__).with_name("keywords.toml"), "the table of keywords"
)
_announced = set[str]()


def our_name(name: str, known: Collection[str]) -> str:
    """Look up a foreign ``name``: one of the ``known`` names, advice (with spaces), or ""."""
    for table in TABLES.values():
        listed = table.get(name, [])
        for ours in [listed] if isinstance(listed, str) else listed:
            if ours in known or " " in ours:
                return ours
    return ""


def forgiving(what: str) -> Callable[[_Made], _Made]:
    """Decorator: let a function or class accept other names of its keywords; a note is shown once
    for each. ``what`` is its name in errors. An unknown keyword raises ConfigError, which suggests
    the nearest known one."""

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
                    theirs = [word for word in TABLES["theirs"] if our_name(word, known) in known]
                    otherwise = did_you_mean(name, theirs, f"it knows {', '.join(known)}")
                    advice = ours or did_you_mean(name, known, otherwise)
                    raise ConfigError(f"{what} has no keyword {name}; {advice}")
                announce(what, name, ours, ours in keywords or ours in parameters[: len(args)])
                keywords[ours] = keywords.pop(name)
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def announce(what: str, name: str, ours: str, twice: bool) -> None:
    """Show once what the foreign keyword ``name`` of ``what`` is called here. ``twice``: our
    keyword was given as well, which raises ConfigError."""
    line = f"{what}: {name} is {ours} here"
    if twice:
        raise ConfigError(f"{line}; give it once")
    if line not in _announced:
        _announced.add(line)
        warn(f"note: {line}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """Advice that names the most similar of the ``known`` names; ``otherwise`` if none has a
    similarity of at least ``likeness``."""
    near = get_close_matches(name, known, 1, likeness)
    return f"did you mean {near[0]}?" if near else otherwise

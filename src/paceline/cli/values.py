"""Values of options, as they are written on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from paceline import config
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline import Grammar


def parse_bytes(text: str) -> int:
    """``config.parse_bytes`` for an option: a bad size is a usage error."""
    try:
        return config.parse_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def parse_draft_length(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise typer.BadParameter(f"--draft-length {text!r}: write auto, or a whole number from 0")
    return int(text)


def parse_logit_bias(pairs: list[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias {pair!r}: write ID=VALUE, as in 42=-5"
            ) from None
    return biases


def parse_grammar(text: str) -> Grammar:
    """``json``, ``KIND:TEXT`` or ``KIND:@FILE``. Raises ConfigError."""
    from paceline import Grammar

    kind, colon, body = text.partition(":")
    if text == "json":
        return Grammar.json()
    if not colon:
        raise ConfigError(f"--grammar {text!r}: write KIND:TEXT, as in regex:[0-9]+")
    if body.startswith("@"):
        try:
            body = Path(body[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--grammar: cannot read {body[1:]}: {error}") from None
    return Grammar(kind, body)

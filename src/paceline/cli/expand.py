"""How commands take their options from tables of settings, and what surrounds each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markup import escape

from paceline.cli.output import quiet_libraries
from paceline.cli.progress import showing
from paceline.errors import ConfigError
from paceline.settings import TableEntry, entries, entry_of


def expand(command: Callable[..., int | None]) -> Callable[..., None]:
    """Replace every parameter annotated with a table of settings by the table's options, and every
    parameter whose default is a ``setting`` by its option. Others are left to Typer.

    The stages of the command are shown, and what it returns is its exit status.
    """
    hints = get_type_hints(command)
    options: dict[str, TableEntry] = {}
    tables: dict[str, tuple[TableEntry, ...]] = {}
    others: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            tables[name] = entries(hints[name], "command")
            options |= {entry.name: entry for entry in tables[name]}
        elif isinstance(parameter.default, Field):
            options[name] = entry_of(name, hints[name], parameter.default)
        else:
            others.append(parameter.replace(annotation=hints[name]))

    def call(**values: Any) -> None:
        quiet_libraries()
        with showing():
            values |= {name: _value(entry, values[name]) for name, entry in options.items()}
            for name, table in tables.items():
                values[name] = hints[name](
                    **{entry.name: values.pop(entry.name) for entry in table}
                )
            code = command(**values)
        if code:
            raise typer.Exit(code)

    return with_signature(call, command, [*others, *map(parameter_of, options.values())])


def with_signature(
    call: Callable[..., Any], command: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., Any]:
    """``call``, which Typer takes for ``command`` with these parameters."""
    # By keyword: then one with a default may stand before one without.
    ordered = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {item.name: item.annotation for item in ordered}
    call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    return call


def parameter_of(entry: TableEntry, left_open: bool = False) -> inspect.Parameter:
    """A setting as Typer knows options; ``left_open``: None, where it was not given, is common
    apart from its default, and its range is looked at by whoever reads it."""
    key, default = entry.key, entry.default
    kind: Any = entry.type
    if key.kind:
        kind = str
    elif entry.is_list:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    shown: Any = False if key.shown == "" else key.shown or True
    limits: dict[str, Any] = {} if key.kind or left_open else {"min": key.low, "max": key.high}
    # A switch that is off needs no --no-... where its default is known.
    flags = key.flags or ((entry.flag,) if default is False and not left_open else ())
    if left_open:
        shown, default = key.shown or str(default).lower().removesuffix(".0"), None
    elif default is MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) if key.kind else [*default]
    help = f"{key.help} One of {', '.join(key.choices)}." if key.choices else key.help
    common = {"help": escape(help), "show_default": shown, **limits}
    if flags and not flags[0].startswith("-"):
        option: Any = typer.Argument(metavar=flags[0], **common)
    else:
        panel = key.panel or None
        option = typer.Option(*flags, metavar=key.metavar, rich_help_panel=panel, **common)
    if entry.optional or left_open:
        kind = kind | None
    how = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, how, default=default, annotation=Annotated[kind, option])


def _value(entry: TableEntry, given: Any) -> Any:
    """What Typer found, as the table holds it; a text that cannot be read is a usage error."""
    if entry.key.kind and given is not None:
        try:
            return entry.read(given, entry.flag)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return tuple(given or ()) if entry.is_list else given

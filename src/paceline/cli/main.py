"""The program ``paceline``: its commands, and how errors become messages and exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli.bench import bench, profile, tune
from paceline.cli.certify import certify
from paceline.cli.demo import demo
from paceline.cli.generate import chat, generate
from paceline.cli.models import check_drafter, doctor, export, pull, quantize, recommend, replay
from paceline.cli.options import Command, SwitchesWithoutType
from paceline.cli.serve import serve
from paceline.cli.train import app as train
from paceline.cli.train import datastore
from paceline.errors import debugging, error_line
from paceline.kernels.compile import are_kernels_here, origin


def _fail(message: str, code: int) -> typer.Exit:
    """Print a message on stderr, in one line; returns the exit to raise."""
    print(" ".join(message.split()), file=sys.stderr)
    return typer.Exit(code)


@contextmanager
def _failing_in_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _fail(str(interrupt) or "interrupted", 130) from None
    except Exception as error:
        # Typer's own exceptions (usage, exit) have an exit code. A broken pipe means that the
        # reader of the output has gone; Typer then ends quietly.
        known = hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError))
        if known or debugging():
            raise
        raise _fail(f"error: {error_line(error)}", 1) from None


class CommandGroup(SwitchesWithoutType, TyperGroup):
    """Commands that fail with one line on stderr; exit code 1, wrong usage 2, Ctrl-C 130."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        with _failing_in_one_line():  # --help and --version print here
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with _failing_in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    name="paceline",
    cls=CommandGroup,
    help="Lossless speculative decoding: the same text as the large model alone, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _build() -> str:
    """The tag of the installed wheel, or "checkout" if the sources of a checkout are running."""
    try:
        installed = metadata.distribution("paceline")
    except metadata.PackageNotFoundError:
        return "checkout"
    if '"editable": true' in (installed.read_text("direct_url.json") or ""):
        return "checkout"
    return "wheel " + " ".join(re.findall(r"^Tag: (\S+)", installed.read_text("WHEEL") or "", re.M))


def _print_version(wanted: bool) -> None:
    if wanted:
        backend = "native" if are_kernels_here() else "reference (torch)"
        print(f"paceline {__version__}\nbuild: {_build()}")
        print(f"backend on CPUs: {backend}\nnative kernels: {origin()}", flush=True)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print version, build, backend and kernels' origin.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (as does PACELINE_DEBUG=1).")
    ] = False,
) -> None:
    if debug:
        os.environ["PACELINE_DEBUG"] = "1"


_MEASURING = (demo, bench, certify, profile, tune, doctor, replay, recommend)
for command in (pull, generate, chat, serve, *_MEASURING, quantize, export, check_drafter):
    app.command(command.__name__.replace("_", "-"), cls=Command)(command)
app.add_typer(train, name="train", cls=CommandGroup)
app.add_typer(datastore, name="datastore", cls=CommandGroup)

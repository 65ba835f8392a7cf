"""``paceline pull``: fetch a model by name, once."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.output import FORCE, print_json, quiet_libraries, replace_anything
from paceline.cli.progress import showing
from paceline.lab.report.columns import Column, record_of, table_of
from paceline.lab.report.render import rich_table
from paceline.model.store import PULLABLE, Pullable, megabytes, pulled


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a model, as in smollm2.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Print the models that can be pulled, and stop.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Fetch a built-in model into the cache folder, once.

    Nothing else fetches it; names of the model hub (OWNER/NAME) are fetched where they are used.
    What was downloaded is checked by its SHA-256. The folder is $PACELINE_CACHE, else
    $XDG_CACHE_HOME/paceline, else ~/.cache/paceline.
    """
    if show_list:
        _print_list(as_json)
        return
    if name is None:
        raise typer.BadParameter("which model? `paceline pull smollm2`, or --list for all")
    replace_anything(force)
    fetch(name, as_json)


def in_short(entry: Pullable) -> str:
    """What would be pulled and how large it is, in one line."""
    return (
        f"{entry.full_name} ({entry.what}, {entry.licence}) is not here yet: "
        f"{megabytes(entry.download)} to download from the {entry.source}, "
        f"{megabytes(entry.on_disk)} on the disk."
    )


def fetch(name: str, as_json: bool = False, quiet: bool = False) -> None:
    """Pull with progress on stderr, and say where the model is unless ``quiet``."""
    quiet_libraries()
    from paceline.pull import pull as pull_model

    with showing():
        result = pull_model(name)
    entry = result.entry
    if quiet:
        return
    if as_json:
        print_json(
            {
                "name": entry.full_name,
                "folder": str(result.folder),
                "source": entry.source,
                "location": entry.location,
                "licence": entry.licence,
                "sha256": result.sha256,
                "bytes": result.size,
                "fetched": result.fetched,
            }
        )
        return
    word = "ready" if result.fetched else "already there"
    print(f"{entry.full_name} is {word}: {entry.what} ({entry.licence})")
    print(f"  {result.folder}")
    print(f"  SHA-256 of the weights {result.sha256}")
    print(f"Try: paceline chat --model {entry.full_name}")


def _size(entry: Pullable) -> str:
    return f"{megabytes(entry.download)} to download, {megabytes(entry.on_disk)} on disk"


_LISTED = (
    Column("name", "name", "name"),
    Column("what", "model", "what"),
    Column("source", "", "source"),
    Column("location", "", "location"),
    Column("", "source", "", lambda entry: f"{entry.source}: {entry.location}"),
    Column("licence", "licence", "licence"),
    Column("download_bytes", "", "download"),
    Column("disk_bytes", "", "on_disk"),
    Column("sha256", "", "weights_sha256"),
    Column("", "size", "", _size),
    Column("folder", "", "", stored=pulled),
    Column("", "here", "", lambda entry: "no" if pulled(entry) is None else "yes"),
)


def _print_list(as_json: bool) -> None:
    entries = PULLABLE.values()
    if as_json:
        print_json({"models": [record_of(entry, _LISTED) for entry in entries]})
        return
    console = Console()
    console.print(rich_table(table_of(entries, _LISTED)))
    for entry in entries:
        sha256 = entry.weights_sha256 or "checked against the hub's own"
        console.print(f"{entry.name}: SHA-256 of the weights {sha256}", soft_wrap=True)

"""``paceline pull``: fetch a model by name, once."""

from __future__ import annotations

import typer

from paceline.cli.options import expand, fetch
from paceline.cli.output import WriteOptions
from paceline.lab.report.document import Column, record_of
from paceline.model.names import PULLABLE, Pullable, megabytes, pulled
from paceline.settings import setting

_LISTED = (
    *map(Column, ("name", "what", "source", "location", "licence")),
    Column("download_bytes", path="download"),
    Column("disk_bytes", path="on_disk"),
    Column("sha256", path="weights_sha256"),
    Column("folder", path="", stored=pulled),
)


@expand
def pull(
    output: WriteOptions,
    name: str | None = setting(None, "Name of a model, as in smollm2.", flags=("NAME",)),
    show_list: bool = setting(False, "Print what can be pulled, and stop.", flags=("--list",)),
) -> None:
    """Fetch a built-in model into the cache folder, once.

    Nothing else fetches it; names of the model hub (OWNER/NAME) are fetched where they are used.
    What was downloaded is checked by its SHA-256. The folder is $PACELINE_CACHE, else
    $XDG_CACHE_HOME/paceline, else ~/.cache/paceline.
    """
    if show_list:
        models = PULLABLE.values()
        output.show({"models": [record_of(m, _LISTED) for m in models]}, *map(_described, models))
        return
    if name is None:
        raise typer.BadParameter("which model? `paceline pull smollm2`, or --list for all")
    result = fetch(name)
    entry, folder = result.entry, str(result.folder)
    same = {key: getattr(entry, key) for key in ("source", "location", "licence")}
    did = {"sha256": result.sha256, "bytes": result.size, "fetched": result.fetched}
    word = "ready" if result.fetched else "already there"
    output.show(
        {"name": entry.full_name, "folder": folder, **same, **did},
        f"{entry.full_name} is {word}: {entry.what} ({entry.licence})",
        f"  {folder}\n  SHA-256 of the weights {result.sha256}",
        f"Try: paceline chat --model {entry.full_name}",
    )


def _described(entry: Pullable) -> str:
    sizes = f"{megabytes(entry.download)} to download, {megabytes(entry.on_disk)} on disk"
    return (
        f"{entry.name}: {entry.what} ({entry.licence})\n"
        f"  {sizes}; {'is here' if pulled(entry) else 'not pulled yet'}\n"
        f"  {entry.source}: {entry.location}\n"
        f"  SHA-256 of the weights {entry.weights_sha256 or 'as the hub states it'}"
    )

"""``paceline datastore``: build the files that ``--draft datastore:FILE`` drafts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import Command, TargetName, expand
from paceline.cli.output import WriteOptions, print_json
from paceline.core.stages import info, stage
from paceline.errors import DataError
from paceline.settings import setting

if TYPE_CHECKING:
    import numpy as np

    from paceline.model.tokenizer import Tokenizer

app = typer.Typer(help="Datastores for drafting by retrieval.", no_args_is_help=True)
_TEXT_SUFFIXES = (".txt", ".text", ".md")


@app.callback()
def root() -> None:
    """Makes ``build`` a subcommand, although it is the only one."""


@app.command("build", cls=Command)
@expand
def build(
    target: TargetName,
    output: WriteOptions,
    files: tuple[Path, ...] = setting(
        MISSING, "JSONL(.gz) files in the format of `train`, or plain text files.", flags=("FILES",)
    ),
    out: Path = setting(MISSING, "File to write."),
    from_answers: bool = setting(
        False,
        "Take only the assistant's answers; the model's own (`train sample`) work best.",
    ),
    min_count: int = setting(2, "Keep continuations that occur at least this often.", low=1),
    exclude_licenses: tuple[str, ...] = setting(
        (), "Leave out records whose license contains this text.", flags=("--exclude-license",)
    ),
) -> None:
    """Write a datastore of texts, in a model's tokens, for `--draft datastore:FILE`."""
    from paceline.draft.datastore import write_datastore
    from paceline.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target.model)
    texts: list[np.ndarray] = []
    for file in files:
        if file.suffix.lower() not in _TEXT_SUFFIXES:
            texts += _read_records(file, tokenizer, from_answers, exclude_licenses)
        elif from_answers:
            raise DataError(f"{file} is plain text, which has no answers; give JSONL records")
        else:
            texts += _read_text(file, tokenizer)
    with stage("sorting contexts"):
        tokens, contexts = write_datastore(out, texts, tokenizer, min_count)
    size = out.stat().st_size
    if output.as_json:
        print_json({"file": str(out), "tokens": tokens, "contexts": contexts, "bytes": size})
        return
    info(f"{tokens:,} tokens, {contexts:,} contexts, {size / 1e6:,.1f} MB in {out}")
    info(f"use it with --draft datastore:{out} or --draft hybrid:suffix+ngram+datastore:{out}")


def _read_text(file: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The token ids of a text file."""
    import numpy as np

    from paceline.lab.bench.prompts import read_records

    for _, record in read_records(file):
        ids = tokenizer.backend_tokenizer.encode(record["text"], add_special_tokens=False).ids
        yield np.array(ids, np.int64)


def _read_records(
    file: Path, tokenizer: Tokenizer, answers: bool, exclude_licenses: tuple[str, ...]
) -> Iterator[np.ndarray]:
    """The token ids of a file's records, or of their answers. Each answer includes the tokens
    before it that a lookup of its first token needs."""
    import numpy as np

    from paceline.draft.datastore import MATCH
    from paceline.train.data import encode_stream

    stream = encode_stream(file, tokenizer, exclude_licenses, "assistant" if answers else "all")
    kept = np.convolve(stream.loss_mask, np.ones(MATCH + 1))[MATCH:] > 0
    cuts = np.union1d(stream.starts, np.flatnonzero(np.diff(kept)) + 1)
    for start, end in pairwise([0, *cuts, len(kept)]):
        if kept[start:end].any():
            yield stream.ids[start:end]

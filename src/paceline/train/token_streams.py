"""The token streams of a run: made from its files once, kept beside it for when it is resumed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np

from paceline.files import telling, write_aside
from paceline.train.data import Source, Stream, encode_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TokenStreams:
    """Streams of files below ``folder``, as ``encode_stream`` makes them."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    exclude_licenses: Sequence[str]
    loss_on: str

    def file(self, source: Source) -> Path:
        """Where the stream of a file is kept; files of one name may lie in different folders."""
        place = zlib.crc32(str(source.path.resolve()).encode())
        return self.folder / f"{source.path.name}.{place:08x}.npz"

    def read(self, source: Source) -> Stream:
        """The kept stream, made anew if there is none or it is damaged. Raises DataError."""
        file = self.file(source)
        try:
            with np.load(file) as saved:
                stream = Stream(str(saved["name"]), saved["ids"], saved["learn"], saved["starts"])
            if stream.fits(len(self.tokenizer)):
                return stream
        except (OSError, EOFError, ValueError, KeyError, BadZipFile):
            pass
        return encode_stream(source.path, self.tokenizer, self.exclude_licenses, self.loss_on)

    def keep(self, source: Source, stream: Stream) -> None:
        """Save a stream for a resumed run. Raises WriteError."""
        what, file = "the token stream", self.file(source)
        with telling(what, file):
            file.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(file, what, durable=False) as sink:
            np.savez(
                sink,
                name=np.array(stream.name),
                ids=stream.ids,
                learn=stream.learn,
                starts=stream.starts,
            )

"""The token streams of a run: made from its files once, kept beside it for when it is resumed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np

from paceline.files import telling, write_aside
from paceline.train.data import Source, Stream, encode_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class TokenStreams:
    """Streams of files below ``folder``, as ``encode_stream`` makes them."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    exclude_licenses: Sequence[str]
    loss_on: str
    _found: set[Path] = field(default_factory=set)  # files that were read, whole

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
                self._found.add(file)
                return stream
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, BadZipFile):
            pass
        return encode_stream(source.path, self.tokenizer, self.exclude_licenses, self.loss_on)

    def keep(self, source: Source, stream: Stream) -> None:
        """Save a stream for a resumed run, unless it was read from there. Raises WriteError."""
        what, file = "the token stream", self.file(source)
        if file in self._found:
            return
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

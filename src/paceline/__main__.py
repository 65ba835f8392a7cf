"""The ``paceline`` script, and ``python -m paceline``."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line. Ctrl-C prints one line, even while the commands are being imported."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell (2>&-)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif not isinstance(stream, TextIOWrapper):  # the caller's own
            continue
        elif mode == "w" and stream.errors == "strict":  # no character may raise an error
            stream.reconfigure(errors="backslashreplace")
        elif mode == "r":  # nor a byte; ASCII is a part of UTF-8
            encoding = stream.encoding.lower().replace("ascii", "utf-8")
            stream.reconfigure(encoding=encoding, errors="surrogateescape")
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:  # within a command, the command group handles it
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""The ``paceline`` script, and ``python -m paceline``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C prints one line, even while the commands are being imported."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell (2>&-)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:  # within a command, the command group handles it
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

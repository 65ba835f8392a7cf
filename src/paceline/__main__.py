"""The ``paceline`` script, and ``python -m paceline``."""

from __future__ import annotations

import sys


def main() -> None:
    """Ctrl-C is one line, also while the commands are imported."""
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:  # inside a command the commands' group says it
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""What the examples with a server share: `paceline serve`, started and ended."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paceline_serve(*arguments: str) -> Iterator[str]:
    """The address of a server that runs as long as the block does, such as http://127.0.0.1:8000.

    Port 0 is any free one. The first line that the server prints says which, and that it is ready.
    """
    command = ["paceline", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://[\w.]+:\d+", server.stdout.readline())
            if address is None:
                raise SystemExit("the server did not start; its own words are above")
            yield address[0]
        finally:
            server.terminate()

"""A program that speaks llama-server's endpoints and makes its tokens up: ``last + 1`` each time.

``--ends-early`` (in the model file's bytes) ends answers after two tokens, ``--dies`` ends at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-m", "--host", "-t", "-tb", "-np", "-c"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    faults = Path(given.m).read_text(encoding="utf-8")
    if "dies" in faults:
        print("error: unknown model architecture", file=sys.stderr)
        sys.exit(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found: dict[str, Any] = {"status": "ok"}
            if self.path == "/v1/models":
                found = {"data": [{"id": "it", "meta": {"n_vocab": 99}}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/completion" and asked["return_tokens"]
            assert asked["cache_prompt"] is False and asked["stream"]
            self.send_response(200)
            self.end_headers()
            count = 2 if "ends early" in faults else asked["n_predict"]
            token = asked["prompt"][-1]
            for _ in range(count):
                token += 1
                self.say({"content": f" {token}", "tokens": [token], "stop": False})
            read = len(asked["prompt"])
            self.say({"stop": True, "tokens_predicted": count, "tokens_evaluated": read})

        def say(self, what: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(what)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

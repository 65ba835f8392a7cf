"""Is some server's speculative decoding lossless? Ask it, whoever made it.

    llama-server -m model.gguf --spec-type ngram-simple --port 8080     # or vllm serve, or ...
    python examples/certify_another_engine.py http://127.0.0.1:8080

Without an address it certifies a server of ours, which it starts. No model is loaded here: texts,
logprobs and samples are compared with what the server itself says they should be. Where the same
model also runs without speculation, name that server second, and texts are compared as well:

    python examples/certify_another_engine.py http://127.0.0.1:8080 http://127.0.0.1:8081
"""

import sys
from contextlib import nullcontext

from local_server import paceline_serve
from paceline import PacelineError
from paceline.lab.budget import Budget
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.server import ServerCertifier, connect

# Beginnings that leave the next token open. More prompts, requests and seconds see smaller faults:
# `paceline certify --url` has the options, and prints tables instead of lines.
PROMPTS = [
    ("story", "Once upon a time, there was a little"),
    ("code", "def add(a, b):\n    return"),
    ("question", "What is the capital of France? The capital of France is"),
]
SECONDS, REQUESTS = 60, 100


def certify(address: str, reference: str | None = None) -> int:
    """Prints what was checked; returns 0 (lossless), 1 (it is not) or 3 (too little was seen)."""
    # `connect` returns the server, and itself with speculation off where it can switch that.
    server, plain = connect(address, None, None)
    if reference is not None:
        plain, _ = connect(reference, None, None)
    effort = Effort(num_prompts=len(PROMPTS), requests=REQUESTS)
    certifier = ServerCertifier(server, plain, PROMPTS, effort, Budget(SECONDS))
    certifier.run()
    certificate = certifier.certificate()
    for part in certificate.record()["parts"]:
        print(f"{part['part']:10} {part['checked']:4} checked, {len(part['problems'])} problems")
    for problem in certificate.problems:
        print("problem:", problem)
    print(certificate.verdict)
    return 0 if certificate.lossless else 1 if certificate.problems else 3


if __name__ == "__main__":
    started = nullcontext(sys.argv[1]) if len(sys.argv) > 1 else paceline_serve("paceline/tiny")
    try:
        with started as address:
            sys.exit(certify(address, *sys.argv[2:]))
    except PacelineError as error:  # nothing answers there, or it gives no text
        sys.exit(f"error: {error}")

"""How much a certification tests: settings that are also the options of the command."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.keywords import forgiving
from paceline.settings import entries, under

MIN_SAMPLES = 100  # at a prefix, for a test there
# Tokens of a server's answer: errors show early in a text, and many requests are sent.
MAX_SERVER_TOKENS = 32

_effort = under("How much is tested")


@forgiving("Effort")
@dataclass(frozen=True)
class Effort:
    """Sample sizes of a certification. A server gets ``num_prompts`` prompts in turn, in up to
    ``requests`` requests. Raises ConfigError on a value out of range."""

    num_prompts: int = _effort(8, "Prompts whose texts are compared token by token.", low=1)
    max_tokens: int = _effort(64, "New tokens per prompt.", low=8)
    prefixes: int = _effort(4, "Number of prefixes after which tokens are sampled.", low=1)
    samples: int = _effort(
        2000, "Samples per prefix; four times as many detect a bias half as large.", low=MIN_SAMPLES
    )
    seed: int = _effort(0, "Seed; makes the run repeatable.", low=0, high=2**63 - 1)
    requests: int = _effort(
        400,
        f"Most requests sent to a server (--url), each of at most {MAX_SERVER_TOKENS} tokens.",
        low=1,
    )

    def __post_init__(self) -> None:
        for entry in entries(Effort):
            entry.read(getattr(self, entry.name), entry.name)

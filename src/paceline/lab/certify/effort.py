"""How much a certification tests: settings, from which the command has its options."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.keywords import forgiving
from paceline.errors import ConfigError
from paceline.settings import entries, under

FEWEST = 100  # samples from which a prefix is judged
LONGEST = 32  # tokens of a server's answer: what is wrong shows at once, and requests are many

_effort = under("How much is tested")


@forgiving("Effort")
@dataclass(frozen=True)
class Effort:
    """Checked on construction: raises ConfigError. ``alpha`` is the chance that a lossless engine
    fails one of the distribution tests. A server is asked ``num_prompts`` prompts over and over, in
    ``requests`` requests."""

    num_prompts: int = _effort(8, "Prompts compared token for token.", low=1)
    max_tokens: int = _effort(64, "New tokens of each prompt.", low=8)
    prefixes: int = _effort(4, "Prefixes behind which samples are drawn.", low=1)
    samples: int = _effort(
        2000, "Samples a prefix; four times as many see half the bias.", low=FEWEST
    )
    alpha: float = _effort(0.001, "Chance that a lossless engine fails.")
    seed: int = _effort(0, "Makes the run repeatable.", low=0, high=2**63 - 1)
    requests: int = _effort(
        400, f"Requests sent to a server (--url) at most, of {LONGEST} tokens at most.", low=1
    )

    def __post_init__(self) -> None:
        for entry in entries(Effort):
            entry.read(getattr(self, entry.name), entry.name)
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")

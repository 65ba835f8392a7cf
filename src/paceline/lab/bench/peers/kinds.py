"""What all peers have in common: their specs, and what could not be made equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from paceline.errors import PacelineError
from paceline.lab.bench.outcome import Ask, TimedAnswer
from paceline.lab.report.document import Table

OPENVINO, LLAMACPP, URL = "openvino", "llamacpp", "url"
NEEDS = {OPENVINO: "FOLDER", LLAMACPP: "FILE.gguf", URL: "http://HOST:PORT"}
EQUAL = "equal"
ASPECTS = ("template", "ids", "ignore_eos", "precision", "cache", "threads")


class PeerFailedError(PacelineError):
    """Another engine could not be started, or did not answer."""


@dataclass(frozen=True)
class PeerTools:
    """Where the other engines are. None: the usual places, see ``llamacpp.py`` and
    ``openvino.py``."""

    llama_server: str | None = None
    openvino_python: str | None = None


@dataclass(frozen=True)
class OwnSide:
    """What a peer is held against: our tokenizer and its width, threads, the words for our
    precision, and the most tokens of a request, answer included."""

    tokenizer: PreTrainedTokenizerFast
    vocabulary: int
    threads: int
    precision: str
    longest: int


@dataclass
class PeerDifferences:
    """What of a peer's runs was not as ours were, in words; ``EQUAL`` where it was.

    The prompts are rendered by the target's own template and sent as ids, or as the text that these
    stand for.
    """

    template: str = EQUAL
    ids: str = EQUAL
    ignore_eos: str = EQUAL
    precision: str = EQUAL
    cache: str = EQUAL  # of prompts: whether an answer may begin where an earlier one's prompt did
    threads: str = EQUAL
    answers: int = field(default=0, repr=False)
    short: int = field(default=0, repr=False)

    def saw(self, ask: Ask, answer: TimedAnswer, read: int | None) -> None:
        """``read``: tokens of the prompt as the peer counted them."""
        self.answers += 1
        if read is not None and read != len(ask.prompt):
            self.ids = f"read {read} tokens where the prompt has {len(ask.prompt)}"
        if ask.params.ignore_eos and answer.count < ask.params.max_tokens:
            self.short += 1

    def record(self) -> dict[str, str]:
        found = {name: str(getattr(self, name)) for name in ASPECTS}
        if self.short:
            found["ignore_eos"] = f"{self.short} of {self.answers} answers ended early"
        return found


def known(name: str, ids: Sequence[int], own: OwnSide) -> tuple[int, ...]:
    """Ids that the target has, too. Raises PeerFailedError."""
    if any(not 0 <= token < own.vocabulary for token in ids):
        raise PeerFailedError(
            f"{name} wrote the id {max(ids)}, but the target has {own.vocabulary}: it runs another "
            "model; give it a form of the target"
        )
    return tuple(ids)


def shares(total: int, weights: list[int]) -> list[int]:
    """``total`` dealt out over deliveries in the proportion of ``weights``, exactly."""
    whole, before, done, found = sum(weights), 0, 0, []
    for weight in weights:
        before += weight
        reached = total * before // whole if whole else total
        found.append(reached - done)
        done = reached
    return found


_NOTE = (
    "Other engines get the prompts as the target's template renders them, and are asked for as "
    "many tokens. cache: of prompts. Their speedup is over our plain decoding, and a text of "
    "theirs that parts from it is no bug of ours."
)


def unequal_table(unequal: Mapping[str, Mapping[str, str]], labels: Mapping[str, str]) -> Table:
    """A row for each engine, by the names that the other tables have for it."""
    heads = ["engine", *(name.replace("_", " ") for name in ASPECTS)]
    rows = [[labels[name], *(own[a] for a in ASPECTS)] for name, own in unequal.items()]
    return Table(heads, rows, note=_NOTE)

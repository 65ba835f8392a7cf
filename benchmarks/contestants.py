"""What the decoding benchmark compares: contestants of `paceline bench`, set up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams
from paceline.lab.bench.engines import Paceline, Transformers
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runs import Ask
from paceline.model.loading import load_module

DRAFT_LENGTH = 4  # of everything with a fixed draft length, ours and theirs
BATCH = 8


@dataclass(frozen=True)
class Pair:
    """Folders or names of a target and its draft, as every contestant loads them."""

    name: str
    target: Path
    draft: Path | None  # the draft model, where there is one: transformers knows no other draft
    device: str
    dtype: str  # "bfloat16" or "float32"
    spec: str = ""  # what ours drafts with, if it is not that model
    ends: frozenset[int] = frozenset()  # where answers end; empty: at the number of tokens only

    @property
    def ours(self) -> str:
        """The spec of our draft."""
        return self.spec or str(self.draft)


def asks(
    prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 0.0, ends: bool = False
) -> tuple[Ask, ...]:
    """Requests for `max_tokens` new tokens each: exactly, or up to the end token with `ends`."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=not ends)
    return tuple(Ask(tuple(prompt), params) for prompt in prompts)


def load_transformers(folder: Path, pair: Pair) -> Any:
    """The module with scaled-dot-product attention."""
    return load_module(str(folder), pair.dtype, pair.device, "sdpa").eval()


def theirs(name: str, model: Any, ends: frozenset[int] = frozenset(), **extra: Any) -> Transformers:
    """`transformers` generate: plain, or with the extra arguments of a speculative method."""
    return Transformers(name, model, ends, extra)


def assisted(model: Any, draft: Any, ends: frozenset[int] = frozenset()) -> Transformers:
    """Assisted generation with a constant draft length and no confidence cut."""
    # The numbers are read from the assistant's own generation config.
    draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return theirs("transformers assisted", model, ends, assistant_model=draft)


def lookup(model: Any, ends: frozenset[int] = frozenset()) -> Transformers:
    """Prompt lookup of `transformers`."""
    return theirs("transformers lookup", model, ends, prompt_lookup_num_tokens=DRAFT_LENGTH)


def ours(name: str, llm: Any) -> Paceline:
    """One configuration of our engine; the prompt is computed anew at every call."""
    return Paceline(Method(name), lambda: llm, BATCH)


def build_llm(
    pair: Pair, *, draft: bool = True, length: int | str = DRAFT_LENGTH, rule: str = "auto"
) -> Any:
    """Our engine: without a draft, with a draft of fixed length, or adaptive ("auto")."""
    from paceline import LLM

    return LLM(
        str(pair.target),
        draft=pair.ours if draft else None,
        dtype=pair.dtype,
        device=pair.device,
        max_batch_size=BATCH,
        draft_length=length if draft else 0,
        rule=rule,
        # `transformers` computes a prompt anew in every round, so we do too.
        prefix_sharing=False,
        seed=0,
    )

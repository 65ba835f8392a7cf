"""The contestants of the decoding benchmark behind one small interface."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

DRAFT_LENGTH = 4  # of everything with a fixed draft length, ours and theirs


@dataclass
class Outcome:
    """One timed call: new tokens by prompt, wall seconds, and what the draft achieved."""

    tokens: list[list[int]]
    seconds: float
    drafted: int = 0
    accepted: int = 0
    target_steps: int = 0

    @property
    def count(self) -> int:
        return sum(len(row) for row in self.tokens)


class Contestant(Protocol):
    """Decodes prompts (token ids) to exactly `max_tokens` new tokens each, ignoring EOS."""

    name: str

    def run(self, prompts: list[list[int]], max_tokens: int) -> Outcome: ...


@dataclass(frozen=True)
class Pair:
    """Folders or names of a target and its draft, as every contestant loads them."""

    name: str
    target: Path
    draft: Path
    device: str
    dtype: str  # "bfloat16" or "float32"


def synchronise(device: str) -> None:
    """Wait for the device, so that a wall time is complete."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def load_transformers(folder: Path, pair: Pair) -> Any:
    """The module with scaled-dot-product attention and no end-of-text token."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # assisted generation warns of its own arguments
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, pair.dtype), attn_implementation="sdpa"
    )
    model = model.to(pair.device).eval()
    # Not by min_new_tokens: that would forbid the token and change the text.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@dataclass
class Transformers:
    """`transformers` generate: plain, or with the extra arguments of a speculative method."""

    name: str
    model: Any
    device: str
    extra: dict[str, Any] = field(default_factory=dict)

    def run(self, prompts: list[list[int]], max_tokens: int) -> Outcome:
        assert len(prompts) == 1, "measured with one prompt at a time only"
        ids = torch.tensor(prompts, device=self.device)
        synchronise(self.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
                **self.extra,
            )
        rows = out[:, ids.shape[1] :].tolist()  # waits for the device
        return Outcome(rows, time.perf_counter() - start)


def assisted(model: Any, draft: Any, device: str) -> Transformers:
    """Assisted generation with a constant draft length and no confidence cut."""
    # The numbers are read from the assistant's own generation config.
    draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return Transformers("transformers assisted", model, device, {"assistant_model": draft})


def lookup(model: Any, device: str) -> Transformers:
    """Prompt lookup of `transformers`."""
    extra = {"prompt_lookup_num_tokens": DRAFT_LENGTH}
    return Transformers("transformers lookup", model, device, extra)


class Paceline:
    """One configuration of our engine; the prompt is computed anew at every call."""

    def __init__(self, name: str, llm: Any, temperature: float = 0.0) -> None:
        self.name, self.llm = name, llm
        self._temperature = temperature

    def run(self, prompts: list[list[int]], max_tokens: int) -> Outcome:
        from paceline import SamplingParams

        params = SamplingParams(
            temperature=self._temperature, max_tokens=max_tokens, ignore_eos=True
        )
        start = time.perf_counter()
        completions = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        stats = [c.stats for c in completions]
        return Outcome(
            [list(c.token_ids) for c in completions],
            seconds,
            drafted=sum(s.drafted_tokens for s in stats),
            accepted=sum(s.accepted_tokens for s in stats),
            target_steps=sum(s.target_steps for s in stats),
        )


def build_llm(
    pair: Pair, *, draft: bool = True, length: int | str = DRAFT_LENGTH, rule: str = "auto"
) -> Any:
    """Our engine: without a draft, with a draft of fixed length, or adaptive ("auto")."""
    from paceline import LLM

    return LLM(
        str(pair.target),
        draft=str(pair.draft) if draft else None,
        dtype=pair.dtype,
        device=pair.device,
        max_batch_size=8,
        draft_length=length if draft else 0,
        rule=rule,
        # `transformers` computes a prompt anew in every round, so we do too.
        prefix_sharing=False,
        seed=0,
    )

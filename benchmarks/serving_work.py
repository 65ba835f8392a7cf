"""What the serving benchmark serves: the models, and prompts with their answers' lengths."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

import real
from paceline import LLM, SamplingParams
from paceline.lab.bench.prompts import evenly, load_prompts

SERVED = "bench"  # the model's name over HTTP


@dataclass(frozen=True)
class Work:
    """Prompts, and the tokens that each is answered with: exactly ``max_tokens``, or with ``ends``
    as many as plain decoding writes until the model ends its answer (``counted``: all of them)."""

    prompts: list[str]
    max_tokens: int
    model: str = "paceline/tiny"
    draft: str = "paceline/tiny-draft"
    ends: bool = False
    counted: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.max_tokens if self.counted is None else self.counted

    def body(self, prompt: str, way: str, tokens: bool) -> bytes:
        return json.dumps(
            {
                "model": SERVED,
                "prompt": prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": not self.ends,
                "stream": True,
                "speculation": {"method": way, "tokens": tokens},
            }
        ).encode()


def counted(llm: LLM, work: Work) -> Work:
    """The work with the number of tokens of its greedy answers; all write the same."""
    if not work.ends:
        return work
    params = SamplingParams(max_tokens=work.max_tokens, temperature=0.0, drafter="none")
    found = llm.generate(work.prompts, params)
    return replace(work, counted=sum(len(one.token_ids) for one in found))


def work_of(args: argparse.Namespace) -> Work:
    """What is served: prompts of eight kinds, and the models."""
    per_kind = 2 if args.quick else 4
    if args.pairs != real.NAME:
        texts = [prompt.text for prompt in load_prompts(per_category=per_kind)]
        pair = args.target or "paceline/tiny", args.draft or "paceline/tiny-draft"
        return Work(texts, args.max_tokens, *pair)
    from paceline.model.loading import load_tokenizer

    folder = str(real.target_folder(args.target))
    tokenizer = load_tokenizer(folder)
    names = args.suites.split(",") if args.suites else real.SETS
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for found in real.texts(args.prompts_dir, names).values()
        for text in evenly(found, per_kind or None)
    ]
    eagle3 = None if args.draft else real.find("eagle3", None)
    draft = args.draft or (f"eagle3:{eagle3}" if eagle3 else "ngram")
    return Work(texts, args.max_tokens, folder, draft, ends=True)

"""Draft models for a given target, distilled on the user's own text.

A draft is as good as its distribution is close to the target's: with the lossless rules a sampled
token is accepted with chance sum_x min(p(x), q(x)) = 1 - TV(p, q). The forward KL divergence
(Hinton et al. 2015) bounds it and learns fast from nothing; total variation is the thing itself,
and finishes what KL began (DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError, DataError, VocabularyMismatchError
from paceline.model.loading import load_tokenizer
from paceline.model.vocabulary import differences
from paceline.stages import stage
from paceline.train.acceptance import AcceptanceCounts, total, walk
from paceline.train.data import Stream
from paceline.train.heldout import WrittenText, written_texts
from paceline.train.lm import LMConfig, LMTrainer, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOSSES = ("kl", "tv", "mixed")


@dataclass(frozen=True)
class DraftConfig(LMConfig):
    """A draft for ``teacher``, from the weights of ``init`` or new, of the given shape."""

    hidden_size: int = 192
    layers: int = 2
    heads: int = 3
    kv_heads: int = 3
    ffn_size: int = 512
    text_weight: float = 0.0
    loss: str = "kl"
    tv_weight: float = 0.5  # share of total variation in the mixed loss
    draft_length: int = 4  # held-out acceptance is measured for drafts of this length
    held_out: int = 8  # openings of each validation file
    held_out_tokens: int = 96


def _context(model: Any) -> int:
    """Longest text that a model takes."""
    shape = model.config.get_text_config(decoder=True)
    return int(getattr(shape, "max_position_embeddings", None) or sys.maxsize)


class DraftTrainer(LMTrainer):
    """One resumable run; the draft lies in ``out/model`` in the end.

    Raises VocabularyMismatchError if the draft to start from speaks another vocabulary, and what
    LMTrainer raises.
    """

    config: DraftConfig

    def __init__(
        self, config: DraftConfig, out: Path, device: str = "auto", compiled: bool = False
    ) -> None:
        if config.teacher is None:
            raise ConfigError("a draft needs a target to learn from; give --target MODEL")
        if config.loss not in LOSSES:
            raise ConfigError(f"--loss is {config.loss!r}; use one of {', '.join(LOSSES)}")
        if not 0 <= config.tv_weight <= 1:
            raise ConfigError("--tv-weight is a share: use a number from 0 to 1")
        misfit = config.hidden_size % (2 * config.heads) or config.heads % config.kv_heads
        if config.init is None and misfit:
            raise ConfigError(
                f"--hidden-size {config.hidden_size} must be an even multiple of --heads "
                f"{config.heads}, and that a multiple of --kv-heads {config.kv_heads}"
            )
        self._texts: list[WrittenText] | None = None
        super().__init__(config, out, device, compiled)
        limits = [_context(self.model), _context(self.teacher)]
        self.long_len = max(config.seq_len, min(self.long_len, *limits))

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer()
        if self.config.init is not None:
            differing = differences(tokenizer, load_tokenizer(self.config.init))
            if differing:
                raise VocabularyMismatchError(
                    f"draft {self.config.init} and target {self.config.teacher} differ in "
                    f"{differing}; start from a model of the target's family, or leave --draft "
                    "out for a new one"
                )
        return tokenizer

    def _validation(self) -> dict[str, Stream]:
        found = {}
        for source in self.valid_sources:
            with suppress(DataError):  # mere prompts: acceptance is measured on them, no loss
                found[source.name] = self._stream(source)
        return found

    def _distilled(
        self,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        targets: torch.Tensor,
        shares: torch.Tensor,
        tv_weight: float = 0.0,
    ) -> torch.Tensor:
        width = min(logits.shape[1], teacher.shape[1])  # either may be padded
        tv_weight = {"kl": 0.0, "tv": 1.0, "mixed": self.config.tv_weight}[self.config.loss]
        logits, teacher = logits[:, :width], teacher[:, :width]
        return super()._distilled(logits, teacher, targets, shares, tv_weight)

    def evaluate(self, progress: Progress) -> None:
        super().evaluate(progress)
        progress.acceptance = self.measure()
        found = {name: part.to_dict() for name, part in progress.acceptance.items()}
        self.history[-1]["acceptance"] = found

    @torch.no_grad()
    def measure(self) -> dict[str, AcceptanceCounts]:
        """Held-out acceptance by validation file: greedy chains of ``draft_length`` tokens.

        A drafted token counts only where all before it were right, so one forward over the
        target's own text says what the draft would have proposed there.
        """
        if self._texts is None:
            self._texts = self._written()
        self.model.eval()
        found: dict[str, list[AcceptanceCounts]] = {}
        with stage("measuring held-out acceptance", len(self._texts), "texts") as doing:
            for text in self._texts:
                ids = torch.tensor(text.token_ids, device=self.device)
                logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                right = logits[text.prompt - 1 :].argmax(-1) == ids[text.prompt :]
                beyond = F.pad(right, (0, self.config.draft_length - 1))
                matches = beyond.unfold(0, self.config.draft_length, 1)
                found.setdefault(text.source, []).append(walk(matches, undrafted=0))
                doing.advance()
        self.model.train()
        return {name: total(parts) for name, parts in found.items()}

    def _written(self) -> list[WrittenText]:
        config = self.config
        assert self.teacher is not None
        if not self.valid_sources:
            return []
        texts = written_texts(
            self.teacher,
            self.tokenizer,
            self.valid_sources,
            config.held_out,
            config.held_out_tokens,
            config.exclude_licenses,
            self.out / "held_out.json",
        )
        if not texts:
            raise DataError("the target ends every held-out text at once; give other --valid files")
        return texts

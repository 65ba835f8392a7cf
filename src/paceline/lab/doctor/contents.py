"""Checks of a model's files: completeness, trained weights, tokenizers and chat templates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from paceline.draft.vocabulary import match_vocabularies
from paceline.errors import VocabularyMismatchError
from paceline.files import json_object
from paceline.lab.bench.prompts import evenly
from paceline.lab.doctor.findings import NOTE, WARNING, Finding, finding, refusal
from paceline.lab.doctor.models import Model, ModelFiles, check_tensors
from paceline.model.tokenizer import differences

_TENSORS, _VALUES = 8, 4096  # sampled: tensors of each kind, and values of each tensor
# Tolerance for the standard deviation of initial weights. That of 4096 values is known to 1 %.
_TOLERANCE = 0.05
_SAMPLED_ROWS = 64


def check_files(files: ModelFiles) -> Iterator[Finding]:
    if files.gguf is not None:
        if files.gguf.has_unknown_pre_tokenizer:
            yield finding("gguf-tokenizer-unsure", pre=files.gguf.pre_tokenizer)
        return
    if files.absent:
        names = ", ".join(files.absent[:3])
        yield finding("shards-absent", count=len(files.absent), names=names)
    yield from (finding("weights-damaged", text) for text in files.damaged)
    if files.remote:
        yield finding("weights-remote", name=files.name)
    elif files.pickled:
        yield finding("weights-pickled", file=files.pickled[0])
    elif not files.tensors and not files.absent and not files.damaged:
        yield finding("weights-absent", name=files.name)


def check_weights(model: Model) -> Iterator[Finding]:
    yield from check_tensors(model)
    yield from check_values(model.files)
    yield from _check_padding(model)
    yield from _check_tied(model)


def check_values(files: ModelFiles) -> Iterator[Finding]:
    """Check a sample of the tensors for NaN and infinity, and for untrained weights: matrices that
    are all zero or ``_is_initial`` while all norms are one (Gemma: zero)."""
    stored = {} if files.remote else files.tensors
    floats = {k: t for k, t in stored.items() if t.is_floating_point() and t.itemsize > 1}
    matrices = [key for key, tensor in floats.items() if tensor.dim() == 2 and tensor.numel()]
    norms = [key for key in floats if key.endswith("norm.weight")]
    others = [key for key in floats if key not in {*matrices, *norms}]
    matrices, norms, others = (evenly(keys, _TENSORS) for keys in (matrices, norms, others))
    samples: dict[str, torch.Tensor] = {}
    for key in (*matrices, *norms, *others):
        values = floats[key].flatten()
        first = max(0, values.numel() - _VALUES) // 2  # from the middle, which has no padding rows
        samples[key] = values[first : first + _VALUES].float()
        if not bool(samples[key].isfinite().all()):
            yield finding("weights-not-finite", name=key)
            return
    nonzero = [key for key in matrices if bool(samples[key].any())]
    if matrices and not nonzero:
        yield finding("weights-untrained", f"all {len(matrices)} sampled matrices are zero")
    elif (
        nonzero
        and all(set(samples[key].tolist()) in ({0.0}, {1.0}) for key in norms)
        and all(_is_initial(samples[key], floats[key].shape[1], files) for key in nonzero)
    ):
        spreads = [float(samples[key].std()) for key in nonzero]
        also_norms = "norms have their initial values, and " if norms else ""
        yield finding(
            "weights-untrained",
            f"{also_norms}{len(spreads)} sampled matrices have the standard deviation of initial "
            f"weights ({min(spreads):.3g} to {max(spreads):.3g})",
        )


def _is_initial(values: torch.Tensor, inputs: int, files: ModelFiles) -> bool:
    """Whether the standard deviation is that of initial weights: ``initializer_range``, by sqrt(2
    layers) less (GPT-2), or 1 / sqrt(3 inputs) (``torch.nn.Linear``)."""
    spread, config = float(files.config.get("initializer_range") or 0.02), files.config
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    usual = spread, spread / math.sqrt(2 * layers), (3 * inputs) ** -0.5
    # Three standard errors, which is more for few values.
    tolerance = max(_TOLERANCE, 3 / math.sqrt(2 * values.numel()))
    return min(abs(float(values.std()) / one - 1) for one in usual) <= tolerance


def _check_padding(model: Model) -> Iterator[Finding]:
    """Compare the rows of logits with the tokenizer's ids."""
    if model.tokenizer is None:
        return
    ids = max(model.tokenizer.get_vocab().values(), default=-1) + 1
    rows = model.vocab_size
    if ids > rows:
        yield finding("vocabulary-overflows", last=ids - 1, rows=rows)
    if ids >= rows:
        return
    # Padding rows of a draft model are never drafted, so their values do not matter.
    untrained = model.about == "target" and _are_zero(model, range(ids, rows))
    note = ", all zero, so their logits are 0 for every text" if untrained else ""
    severity = WARNING if untrained else None
    code = "vocabulary-padded"
    yield finding(code, severity=severity, rows=rows, ids=ids, last=rows - 1, raw=note)


def _are_zero(model: Model, rows: Sequence[int]) -> bool:
    """Whether these rows of the head, or of the embedding that it is tied to, are all zero."""
    tables = [_table(model, end) for end in ("output", "input")]
    table = next((table for table in tables if table is not None), None)
    if table is None or max(rows) >= table.shape[0]:
        return False
    return not bool(table[list(rows[:: max(1, len(rows) // _SAMPLED_ROWS)])].any())


def _check_tied(model: Model) -> Iterator[Finding]:
    """Check a head that the file stores although it equals, or is tied to, the embedding."""
    head, embedding = (_table(model, end) for end in ("output", "input"))
    if head is None or embedding is None or head is embedding or head.shape != embedding.shape:
        return
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    sample = slice(None, None, max(1, len(head) // _SAMPLED_ROWS))
    if torch.equal(head[sample], embedding[sample]):
        yield finding("tied-head-repeated", numbers=head.numel(), tied=tied)
    elif tied:
        yield finding("tied-head-differs", numbers=head.numel())


def _table(model: Model, end: str) -> torch.Tensor | None:
    """The matrix of the embedding ("input") or the head ("output"); None if the files do not hold
    it, or if it is quantised or not downloaded."""
    if model.quantisation is not None or model.files.remote:
        return None
    part: Any = getattr(model.skeleton, f"get_{end}_embeddings")()
    names = [name for name, module in model.skeleton.named_modules() if module is part]
    tensor = model.files.tensors.get(f"{names[0]}.weight") if names else None
    return tensor if tensor is not None and tensor.dim() == 2 else None


_ROLES = ("bos_token", "eos_token", "pad_token")
# Turn markers of chat templates: <|im_start|>, <start_of_turn>, <s>, and DeepSeek's wide bars.
_MARKER = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>\s]{1,40}\uff5c>|<\w{1,24}_of_\w{1,24}>|</?s>"
)


def check_chat(model: Model, tokenizer: PreTrainedTokenizerFast) -> Iterator[Finding]:
    """Try a target's chat template on a question and an answer."""
    if tokenizer.chat_template is None:
        yield finding("chat-template-absent")
        return
    user, answer = {"role": "user", "content": "What is seven?"}, "It is a number."
    answered = {"role": "assistant", "content": answer}
    chats = (([user], True), ([user], False), ([user, answered], False))
    try:
        asked, bare, whole = (
            str(tokenizer.apply_chat_template(chat, add_generation_prompt=opens, tokenize=False))
            for chat, opens in chats
        )
    except Exception as error:  # the template's own error, or one of jinja
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        yield finding("chat-template-refuses", why=reason)
        return
    markers = dict.fromkeys(_MARKER.findall(whole))
    if unknown := [marker for marker in markers if marker not in tokenizer.get_added_vocab()]:
        pieces = len(tokenizer.encode(unknown[0], add_special_tokens=False))
        yield finding("chat-template-foreign", marks=", ".join(unknown), pieces=pieces)
    before, parts, after = whole.partition(answer)
    if not parts:
        return
    opening = before[len(bare) :].strip() if before.startswith(bare) else ""
    if asked == bare and opening:
        yield finding("chat-template-no-prompt", opening=opening)
    # A token that the template writes after an answer must end generation. Some templates write a
    # closing tag first, so one of these tokens is enough.
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    written = [i for i in tokenizer.encode(after, add_special_tokens=False) if i in special]
    ends = _ends(model).values()
    if written and not set(written) & set().union(*ends):
        token = tokenizer.convert_ids_to_tokens(written[0])
        listed = ", ".join(_named(tokenizer, ids) for ids in ends) or "none"
        yield finding("turn-end-ignored", token=token, id=written[0], ends=listed)


def check_ends(model: Model, tokenizer: PreTrainedTokenizerFast) -> Iterator[Finding]:
    ends = _ends(model)
    widest = ends.get("generation_config.json") or ends.get("config.json") or set()
    outside = [source for source, ids in ends.items() if not ids <= widest]
    if outside:
        shown = "; ".join(f"{source}: {_named(tokenizer, ids)}" for source, ids in ends.items())
        severity = NOTE if outside == ["config.json"] else None
        yield finding("end-tokens-differ", ends=shown, severity=severity)
    for source, ids in ends.items():
        if ordinary := ids - set(tokenizer.added_tokens_decoder):
            ends_at = _named(tokenizer, ordinary)
            yield finding("end-token-ordinary", source=source, ends=ends_at)
            break


def _ends(model: Model) -> dict[str, set[int]]:
    """The end tokens by their source, without sources that name none."""
    first = json_object(model.files.folder / "generation_config.json").get("eos_token_id")
    others = (getattr(part, "eos_token_id", None) for part in (model.config, model.tokenizer))
    names = ("generation_config.json", "config.json", "the tokenizer")
    ends = zip(names, (first, *others), strict=True)
    listed = {source: v if isinstance(v, (list, tuple)) else [v] for source, v in ends}
    ids = {source: {i for i in values if type(i) is int} for source, values in listed.items()}
    return {source: tokens for source, tokens in ids.items() if tokens}


def _named(tokenizer: PreTrainedTokenizerFast, ids: set[int]) -> str:
    def name(index: int) -> str:
        known = index < len(tokenizer)
        return f"{tokenizer.convert_ids_to_tokens(index)!r} ({index})" if known else f"id {index}"

    return ", ".join(name(index) for index in sorted(ids))


def compare(target: Model, draft: Model) -> Iterator[Finding]:
    """Compare two tokenizers as the engine does."""
    tokenizer, other = target.tokenizer, draft.tokenizer or target.tokenizer
    if tokenizer is None or other is None:
        return
    try:
        match = match_vocabularies(target, draft, tokenizer, other)
    except VocabularyMismatchError as error:
        yield refusal("vocabulary-refused", error)
        return
    if match is None:
        yield finding("vocabulary-same", count=len(tokenizer.get_vocab()))
        if target.vocab_size != draft.vocab_size:
            rows = f"{target.vocab_size:,} against the draft's {draft.vocab_size:,}"
            yield finding("vocabulary-padded", f"rows of logits differ: {rows}", about="pair")
    else:
        yield finding("vocabulary-differs", parts=differences(tokenizer, other), share=match.share)
    if draft.tokenizer is None:
        return
    pipeline, other_pipeline = _pipeline(tokenizer), _pipeline(other)
    parts = [part for part, value in pipeline.items() if value != other_pipeline[part]]
    if parts and match is None:
        yield finding("segmentation-differs", parts=" and ".join(parts))
    roles = [role for role in _ROLES if getattr(tokenizer, role) != getattr(other, role)]
    if roles:
        # The engine does not pad, but another padding token is a sign of another fine-tuning.
        severity = NOTE if roles == ["pad_token"] else None
        pairs = (f"{r} {getattr(tokenizer, r)!r} against {getattr(other, r)!r}" for r in roles)
        yield finding("special-tokens-differ", pairs=", ".join(pairs), severity=severity)
    if tokenizer.chat_template is not None and tokenizer.chat_template != other.chat_template:
        what = "none" if other.chat_template is None else "another"
        yield finding("chat-template-differs", what=what)


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What determines how text is split into tokens, except for the vocabulary."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = whole.get("model", {}).get("merges") or []
    return {
        # Stored as "a b" or as ["a", "b"].
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "normalizer": whole.get("normalizer"),
        "pre-tokenizer": whole.get("pre_tokenizer"),
    }

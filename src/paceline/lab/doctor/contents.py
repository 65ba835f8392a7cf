"""Whether the files are all there, whether their numbers look like trained ones, and what
tokenizers and chat templates make of text."""

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

_TENSORS, _VALUES = 8, 4096  # sampled of each kind, and of each of these
_CLOSE = 0.05  # to the spread of initialisation, of which so many values tell about 1 %
_LOOKED_AT = 64  # rows


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
    """Values that no training leaves behind, in a sample of the tensors: NaN and infinity, and
    where norms are all exactly one (Gemma: zero), matrices of zeros or as ``_is_fresh``."""
    whole = {} if files.remote else files.tensors
    floats = {k: t for k, t in whole.items() if t.is_floating_point() and t.itemsize > 1}
    matrices = [key for key, tensor in floats.items() if tensor.dim() == 2 and tensor.numel()]
    norms = [key for key in floats if key.endswith("norm.weight")]
    others = [key for key in floats if key not in {*matrices, *norms}]
    samples: dict[str, torch.Tensor] = {}
    for key in (key for kind in (matrices, norms, others) for key in evenly(kind, _TENSORS)):
        values = floats[key].flatten()
        first = max(0, values.numel() - _VALUES) // 2  # in the middle, where no padding row is
        samples[key] = values[first : first + _VALUES].float()
        if not bool(samples[key].isfinite().all()):
            yield finding("weights-not-finite", name=key)
            return
    matrices = evenly(matrices, _TENSORS)
    begun = [key for key in matrices if bool(samples[key].any())]
    if matrices and not begun:
        yield finding("weights-untrained", f"all {len(matrices)} sampled matrices are zero")
    elif (
        begun
        and all(set(samples[key].tolist()) in ({0.0}, {1.0}) for key in evenly(norms, _TENSORS))
        and all(_is_fresh(samples[key], floats[key].shape[1], files) for key in begun)
    ):
        spreads = [float(samples[key].std()) for key in begun]
        ones = "norms are as they began, and " if norms else ""
        bounds = f"({min(spreads):.3g} to {max(spreads):.3g})"
        text = f"{ones}{len(spreads)} sampled matrices have the spread of fresh ones {bounds}"
        yield finding("weights-untrained", text)


def _is_fresh(values: torch.Tensor, inputs: int, files: ModelFiles) -> bool:
    """Whether they have the standard deviation of the config (``initializer_range``), of that over
    sqrt(2 layers) (GPT-2), or of ``torch.nn.Linear``, 1 / sqrt(3 inputs)."""
    spread, config = float(files.config.get("initializer_range") or 0.02), files.config
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    usual = spread, spread / math.sqrt(2 * layers), (3 * inputs) ** -0.5
    # Of few values the spread is not known well: three standard errors.
    tolerance = max(_CLOSE, 3 / math.sqrt(2 * values.numel()))
    return min(abs(float(values.std()) / one - 1) for one in usual) <= tolerance


def _check_padding(model: Model) -> Iterator[Finding]:
    """Rows of logits against the ids that the tokenizer knows."""
    if model.tokenizer is None:
        return
    known = model.tokenizer.get_vocab().values()
    top, rows = max(known, default=-1) + 1, model.vocab_size
    if top > rows:
        yield finding("vocabulary-overflows", last=top - 1, rows=rows)
    if top >= rows:
        return
    # Those of a draft are never drafted, whatever they hold.
    raw = model.about == "target" and _are_zero(model, range(top, rows))
    values: Any = {"rows": rows, "ids": top, "last": rows - 1, "severity": WARNING if raw else None}
    values["raw"] = ", all zero, so their logits are 0 whatever the text" if raw else ""
    yield finding("vocabulary-padded", **values)


def _are_zero(model: Model, rows: Sequence[int]) -> bool:
    """Whether these rows make no logits: of the file's own head, else of the embedding that it is
    tied to."""
    table = _table(model, "output")
    table = _table(model, "input") if table is None else table
    if table is None or max(rows) >= table.shape[0]:
        return False
    return not bool(table[list(rows[:: max(1, len(rows) // _LOOKED_AT)])].any())


def _check_tied(model: Model) -> Iterator[Finding]:
    """A head in the file beside an embedding that it repeats, or that config.json ties it to."""
    head, embedding = (_table(model, end) for end in ("output", "input"))
    if head is None or embedding is None or head is embedding or head.shape != embedding.shape:
        return
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    some = slice(None, None, max(1, len(head) // _LOOKED_AT))
    if torch.equal(head[some], embedding[some]):
        yield finding("tied-head-repeated", numbers=head.numel(), tied=tied)
    elif tied:
        yield finding("tied-head-differs", numbers=head.numel())


def _table(model: Model, end: str) -> torch.Tensor | None:
    """The matrix of the embedding ("input") or the head, by the name that the architecture has for
    it; None if the files do not have it, or not its values."""
    if model.quantisation is not None or model.files.remote:
        return None
    part: Any = getattr(model.skeleton, f"get_{end}_embeddings")()
    names = [name for name, module in model.skeleton.named_modules() if module is part]
    tensor = model.files.tensors.get(f"{names[0]}.weight") if names else None
    return tensor if tensor is not None and tensor.dim() == 2 else None


_ROLES = ("bos_token", "eos_token", "pad_token")
_WAYS = {
    "intersection": "the draft speaks in the tokens that both have",
    "string": "drafts are re-tokenised as text",
}
# What templates write around turns: <|im_start|>, <start_of_turn>, <s>, and DeepSeek's wide bars.
_MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>\s]{1,40}\uff5c>|<\w{1,24}_of_\w{1,24}>|</?s>")


def check_chat(model: Model) -> Iterator[Finding]:
    """The template of a target, tried on a question and an answer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return
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
    except Exception as error:  # of any kind: the template's own, or jinja's
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        yield finding("chat-template-refuses", why=reason)
        return
    yield from _marks(tokenizer, whole)
    before, parts, after = whole.partition(answer)
    if not parts:
        return
    opening = before[len(bare) :].strip() if before.startswith(bare) else ""
    if asked == bare and opening:
        yield finding("chat-template-no-prompt", opening=opening)
    # What the template writes behind an answer must end generation. Some write a closing tag
    # first: any end token will do.
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    written = [i for i in tokenizer.encode(after, add_special_tokens=False) if i in special]
    ends = _ends(model).values()
    if written and not set(written) & set().union(*ends):
        token = tokenizer.convert_ids_to_tokens(written[0])
        listed = ", ".join(_named(tokenizer, ids) for ids in ends) or "none"
        yield finding("turn-end-ignored", token=token, id=written[0], ends=listed)


def _marks(tokenizer: PreTrainedTokenizerFast, text: str) -> Iterator[Finding]:
    marks = dict.fromkeys(_MARK.findall(text))
    foreign = [mark for mark in marks if mark not in tokenizer.get_added_vocab()]
    if foreign:
        pieces = len(tokenizer.encode(foreign[0], add_special_tokens=False))
        yield finding("chat-template-foreign", marks=", ".join(foreign), pieces=pieces)


def check_ends(model: Model) -> Iterator[Finding]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        return
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
    """By their source; without those that name none."""
    first = json_object(model.files.folder / "generation_config.json").get("eos_token_id")
    others = (getattr(part, "eos_token_id", None) for part in (model.config, model.tokenizer))
    names = ("generation_config.json", "config.json", "the tokenizer")
    ends = zip(names, (first, *others), strict=True)
    listed = {source: v if isinstance(v, (list, tuple)) else [v] for source, v in ends}
    ids = {source: {i for i in values if type(i) is int} for source, values in listed.items()}
    return {source: some for source, some in ids.items() if some}


def _named(tokenizer: PreTrainedTokenizerFast, ids: set[int]) -> str:
    def name(index: int) -> str:
        known = index < len(tokenizer)
        return f"{tokenizer.convert_ids_to_tokens(index)!r} ({index})" if known else f"id {index}"

    return ", ".join(name(index) for index in sorted(ids))


def compare(target: Model, draft: Model, method: str = "auto") -> Iterator[Finding]:
    """What the engine would make of the pair. ``method``: the draft spec's ``vocab`` option."""
    tokenizer, other = target.tokenizer, draft.tokenizer or target.tokenizer
    if tokenizer is None or other is None:
        return
    try:
        match = match_vocabularies(target, draft, tokenizer, other, method)
    except VocabularyMismatchError as error:
        yield refusal("vocabulary-refused", error)
        return
    if match is None:
        yield finding("vocabulary-same", count=len(tokenizer.get_vocab()))
        if target.vocab_size != draft.vocab_size:
            rows = f"{target.vocab_size:,} against the draft's {draft.vocab_size:,}"
            yield finding("vocabulary-padded", f"rows of logits differ: {rows}", about="pair")
    else:
        what, how = differences(tokenizer, other), _WAYS[match.method]
        what = what or "nothing, but vocab is set"
        yield finding("vocabulary-differs", parts=what, share=match.share, how=how)
    if draft.tokenizer is None:
        return
    pipeline, other_pipeline = _pipeline(tokenizer), _pipeline(other)
    parts = [part for part, value in pipeline.items() if value != other_pipeline[part]]
    if parts and match is None:
        yield finding("segmentation-differs", parts=" and ".join(parts))
    roles = [role for role in _ROLES if getattr(tokenizer, role) != getattr(other, role)]
    if roles:
        # Nothing is padded here, but another padding token hints at another tuning.
        severity = NOTE if roles == ["pad_token"] else None
        pairs = (f"{r} {getattr(tokenizer, r)!r} against {getattr(other, r)!r}" for r in roles)
        yield finding("special-tokens-differ", pairs=", ".join(pairs), severity=severity)
    if tokenizer.chat_template is not None and tokenizer.chat_template != other.chat_template:
        what = "none" if other.chat_template is None else "another"
        yield finding("chat-template-differs", what=what)


def _pipeline(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides how text is cut up, but for the vocabulary."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = whole.get("model", {}).get("merges") or []
    return {
        # Written as "a b" or as ["a", "b"].
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "normalizer": whole.get("normalizer"),
        "pre-tokenizer": whole.get("pre_tokenizer"),
    }

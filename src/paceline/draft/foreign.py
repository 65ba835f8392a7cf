"""Speculative decoding configurations of vLLM, read as drafts.

``--draft @vllm.json``, or the JSON itself: the value of vLLM's ``--speculative-config``, also
inside the engine's whole configuration, or an ``export.json`` of ``paceline export``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.params import is_whole
from paceline.errors import ConfigError
from paceline.files import json_object

_WITH_MODEL = {  # vLLM's methods, as our specs
    **{"eagle": "eagle:{},nodes=0", "eagle3": "eagle3:{},nodes=0"},
    **{"draft_model": "model:{}", "medusa": "medusa:{},tree=chain"},
    **{"dflash": "dflash:{}", "dspark": "dspark:{}"},
}
_GENERIC = f"paceline can read methods {', '.join(_WITH_MODEL)}, ngram and suffix"


@dataclass(frozen=True)
class ForeignDraft:
    """``spec`` is ours, ``length`` in levels, ``rule`` None if not given."""

    spec: str
    length: int
    rule: str | None


def foreign_of(draft: object) -> ForeignDraft | None:
    """A draft that is another engine's configuration: a mapping, its JSON, ``@FILE`` with it, or a
    list of one; None for any other. Raises ConfigError."""
    if isinstance(draft, (list, tuple)) and len(draft) == 1:
        (draft,) = draft
    if isinstance(draft, Mapping):
        return foreign_draft(draft, "speculative_config")
    if isinstance(draft, str) and draft.startswith(("@", "{")):
        return _read(draft)
    return None


def _read(text: str) -> ForeignDraft:
    """Raises ConfigError for what cannot be read, or has no equivalent here."""
    path = text[1:] if text.startswith("@") else None
    where = "the configuration" if path is None else f"the configuration {path}"
    try:
        if path is not None:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        parsed = json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError):  # no text, or no JSON
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"{where} is not JSON, or no JSON object; give vLLM's --speculative-config, or a spec "
            "such as ngram:min=2"
        )
    return foreign_draft(parsed, path or where)


def foreign_draft(config: Mapping[str, Any], where: str = "the configuration") -> ForeignDraft:
    """``foreign_of`` for what is parsed. Raises ConfigError."""
    for key in ("config", "speculative_config", "speculative-config"):
        inner = config.get(key)
        if isinstance(inner, dict):
            config = inner
    values = {key.lstrip("-").replace("-", "_"): value for key, value in config.items()}
    if "method" not in values and "num_speculative_tokens" not in values:
        raise ConfigError(
            f"{where} has neither vLLM's method nor num_speculative_tokens; give both"
        )
    length = _whole(values, "num_speculative_tokens", where)
    sampling = values.get("rejection_sample_method")
    if sampling not in (None, "standard", "block"):
        raise ConfigError(
            f"{where} has rejection_sample_method {sampling!r}, which is not lossless; "
            "use standard or block"
        )
    rule = "token" if sampling == "standard" else sampling
    return ForeignDraft(_spec(values, where), length, rule)


def _whole(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not is_whole(value) or value < 1:
        has = f"lacks {key}" if value is None else f"has {value!r} for {key}"
        raise ConfigError(f"{where} {has}; it must be a whole number above 0")
    return value


def _head_config(model: str) -> Mapping[str, Any]:
    """The config.json of a local folder; {} if it cannot be read."""
    return json_object(Path(model).expanduser() / "config.json")


def _method(values: Mapping[str, Any]) -> str:
    """vLLM's method, or its guess where none is named."""
    method, model = values.get("method"), str(values.get("model", ""))
    if method:
        return str(method)
    if model in ("ngram", "[ngram]", "suffix"):
        return model.strip("[]")
    kind = _head_config(model).get("speculators_model_type")
    named = (k for k in ("eagle3", "peagle", "dflash", "dspark") if k == kind or k in model.lower())
    return next(named, "draft_model").replace("peagle", "eagle3")


def _spec(values: Mapping[str, Any], where: str) -> str:
    method = _method(values)
    if method in _WITH_MODEL:
        model = values.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(f"{where} names no model; give the folder of the draft")
        alone = method == "draft_model" and "pard_token" in _head_config(model)
        off = ",parallel=off" if alone and not values.get("parallel_drafting") else ""
        return _WITH_MODEL[method].format(model) + off
    if method in ("ngram", "ngram_gpu"):
        ends = "prompt_lookup_min", "prompt_lookup_max"
        given = {key: _whole(values, key, where) for key in ends if values.get(key)}
        usual = next(iter(given.values()), 5)  # 5: vLLM's own default
        least, most = (given.get(key, usual) for key in ends)
        length = _whole(values, "num_speculative_tokens", where)
        return f"ngram:min={least},max={most},length={length},candidates=1"
    if method == "suffix":
        kept = values.get("suffix_decoding_max_cached_requests", 10_000)
        return (
            f"suffix:max_depth={_whole(values, 'suffix_decoding_max_tree_depth', where, 24)},"
            f"factor={values.get('suffix_decoding_max_spec_factor', 1.0)},"
            f"min_prob={values.get('suffix_decoding_min_token_prob', 0.1)}"
            + ("" if kept else ",global=off")
        )
    raise ConfigError(f"{where} has vLLM's method {method!r}; {_GENERIC}")

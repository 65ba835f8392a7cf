"""Speculative decoding configurations of vLLM and SGLang, converted to draft specs.

``--draft @vllm.json``, or the JSON itself: the value of vLLM's ``--speculative-config``, SGLang's
``speculative_*`` arguments, a configuration that contains one of them, or our ``export.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.params import is_whole, shown
from paceline.errors import ConfigError
from paceline.files import json_object, user_path

_WITH_MODEL = {  # method of vLLM -> draft spec
    **{"eagle": "eagle:{},nodes=0", "eagle3": "eagle3:{},nodes=0"},
    **{"draft_model": "model:{}", "medusa": "medusa:{},tree=chain"},
    **{"dflash": "dflash:{}", "dspark": "dspark:{}"},
}
_GENERIC = f"paceline can read methods {', '.join(_WITH_MODEL)}, mtp, ngram and suffix"
_USUAL_LENGTH = {"suffix": 24, "mtp": 1}  # where vLLM does not demand num_speculative_tokens
_ALGORITHMS = {  # algorithm of SGLang -> kind
    **{"EAGLE3": "eagle3", "EAGLE": "eagle", "STANDALONE": "model"},
    **{"DFLASH": "dflash", "DSPARK": "dspark"},
}


@dataclass(frozen=True)
class ForeignDraft:
    """A draft spec, the draft length in levels and the verification rule; None if not stated."""

    spec: str
    length: int | None
    rule: str | None


def foreign_of(draft: object) -> ForeignDraft | None:
    """The draft if ``draft`` is another engine's configuration (a mapping, its JSON, ``@FILE``, or
    a list of one of these), else None. Raises ConfigError."""
    if isinstance(draft, (list, tuple)) and len(draft) == 1:
        (draft,) = draft
    if isinstance(draft, Mapping):
        return foreign_draft(draft, "speculative_config")
    if isinstance(draft, str) and draft.startswith(("@", "{")):
        return _read(draft)
    return None


def _read(text: str) -> ForeignDraft:
    """Reads JSON or ``@FILE``. Raises ConfigError if it cannot be read or has no equivalent."""
    path = text[1:] if text.startswith("@") else None
    where = "the configuration" if path is None else f"the configuration {path}"
    try:
        if path is not None:
            text = user_path(path).read_text(encoding="utf-8")
        parsed = json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not text, or not JSON
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"{where} is not JSON, or no JSON object; give vLLM's --speculative-config or "
            "SGLang's arguments by name, or a spec such as ngram:min=2"
        )
    return foreign_draft(parsed, path or where)


def foreign_draft(config: Mapping[str, Any], where: str = "the configuration") -> ForeignDraft:
    """Converts a parsed configuration; ``where`` names it in errors. Raises ConfigError."""
    for key in ("config", "speculative_config", "speculative-config"):
        inner = config.get(key)
        if isinstance(inner, dict):
            config = inner
    values = {key.lstrip("-").replace("-", "_"): value for key, value in config.items()}
    if "speculative_algorithm" in values:
        return _sglang(values, where)
    if "method" in values or "num_speculative_tokens" in values:
        return _vllm(values, where)
    raise ConfigError(
        f"{where} has neither vLLM's method and num_speculative_tokens nor SGLang's "
        "speculative_algorithm; give one of them"
    )


def _whole(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not is_whole(value) or value < 1:
        has = f"lacks {key}" if value is None else f"has {shown(value)} for {key}"
        raise ConfigError(f"{where} {has}; it must be a whole number above 0")
    return value


def _model(values: Mapping[str, Any], key: str, where: str) -> str:
    model = values.get(key)
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{where} names no {key}; give the folder of the draft")
    return model


def _head_config(model: str) -> Mapping[str, Any]:
    """The config.json in a local folder; {} if it cannot be read."""
    return json_object(user_path(model) / "config.json")


# -- vLLM --------------------------------------------------------------------------------------


def _vllm(values: Mapping[str, Any], where: str) -> ForeignDraft:
    method = _vllm_method(values)
    length = _whole(values, "num_speculative_tokens", where, _USUAL_LENGTH.get(method))
    sampling = values.get("rejection_sample_method")
    if sampling not in (None, "standard", "block"):
        raise ConfigError(
            f"{where} has rejection_sample_method {sampling!r}, which is not lossless; "
            "use standard or block"
        )
    rule = "token" if sampling == "standard" else sampling
    return ForeignDraft(_vllm_spec(method, values, length, where), length, rule)


def _vllm_method(values: Mapping[str, Any]) -> str:
    """The method, or what vLLM infers from the model if none is named."""
    method, model = values.get("method"), str(values.get("model", ""))
    if method:
        return "mtp" if str(method).endswith("_mtp") else str(method)
    if model in ("ngram", "[ngram]", "suffix"):
        return model.strip("[]")
    kind = _head_config(model).get("speculators_model_type")
    named = (k for k in ("eagle3", "peagle", "dflash", "dspark") if k == kind or k in model.lower())
    return next(named, "draft_model").replace("peagle", "eagle3")


def _vllm_spec(method: str, values: Mapping[str, Any], length: int, where: str) -> str:
    if method in _WITH_MODEL:
        model = _model(values, "model", where)
        alone = method == "draft_model" and "pard_token" in _head_config(model)
        off = ",parallel=off" if alone and not values.get("parallel_drafting") else ""
        return _WITH_MODEL[method].format(model) + off
    if method == "mtp":
        return f"mtp:{values['model']}" if values.get("model") else method
    if method in ("ngram", "ngram_gpu"):
        ends = "prompt_lookup_min", "prompt_lookup_max"
        given = {key: _whole(values, key, where) for key in ends if values.get(key)}
        usual = next(iter(given.values()), 5)  # 5: vLLM's own default
        least, most = (given.get(key, usual) for key in ends)
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


# -- SGLang ------------------------------------------------------------------------------------


def _sglang(values: Mapping[str, Any], where: str) -> ForeignDraft:
    for key in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if str(values.get(key, 1.0)) not in ("1", "1.0", "None"):
            raise ConfigError(
                f"{where} has {key} {values[key]}, which is not lossless; leave it at 1.0"
            )
    algorithm = str(values["speculative_algorithm"]).upper()
    nodes = max(1, _whole(values, "speculative_num_draft_tokens", where, 9) - 1)  # minus the root
    if algorithm == "NGRAM":
        return ForeignDraft(f"ngram:length={nodes}", nodes, None)
    if algorithm not in _ALGORITHMS:
        raise ConfigError(
            f"{where} has SGLang's algorithm {algorithm}; "
            f"paceline can read {', '.join(_ALGORITHMS)} and NGRAM"
        )
    kind, model = _ALGORITHMS[algorithm], _model(values, "speculative_draft_model_path", where)
    rule = "block" if values.get("speculative_use_block_verification") else None
    if algorithm in ("DFLASH", "DSPARK"):
        roots = {"num_draft_tokens": 1, "dflash_block_size": 1, "dspark_block_size": 0}
        given = {f"speculative_{key}": root for key, root in roots.items()}
        lengths = [_whole(values, key, where) - given[key] for key in given if key in values]
        length = max(1, *lengths) if lengths else None  # None: the head's block
        return ForeignDraft(f"{kind}:{model}", length, rule)
    width = _whole(values, "speculative_eagle_topk", where, 1)
    shape = "nodes=0" if width == 1 else f"nodes={nodes},width={width}"
    if kind == "eagle" and width > 1:
        kind = "eagle2"  # our kind with dynamic trees
    elif kind == "eagle3":
        shape += _inputs(model)
    if values.get("speculative_use_rejection_sampling"):
        rule = "token"
    steps = _whole(values, "speculative_num_steps", where)
    return ForeignDraft(f"{kind}:{model},{shape}", steps, rule)


def _inputs(model: str) -> str:
    """The option ``feature_layers``: layers numbered by inputs, one more than SGLang's outputs."""
    nested = _head_config(model).get("eagle_config")
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if not isinstance(ids, list) or not all(map(is_whole, ids)):
        return ""
    return ",feature_layers=" + "x".join(str(number + 1) for number in ids)

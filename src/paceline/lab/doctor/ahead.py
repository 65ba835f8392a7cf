"""What another engine will do with a draft: with its own configuration, or with an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any

from paceline.draft.foreign import ForeignDraft, head_config, vllm_method
from paceline.errors import PacelineError
from paceline.lab.doctor.findings import Finding, finding, refusal
from paceline.lab.export import export
from paceline.lab.export.speculation import LAYERS


def look_ahead(
    engine: str, model: str, draft: str | None, foreign: ForeignDraft | None, **settings: Any
) -> list[Finding]:
    """Findings about ``engine``; ``foreign`` is a configuration of its own, None an export.
    ``settings`` are keywords of ``export``. Raises ConfigError for an engine that is not known."""
    if foreign is not None and foreign.engine == engine:
        reader = _vllm if engine == "vllm" else _sglang
        return list(starmap(finding, reader(foreign.values)))
    try:
        made = export(engine, model, draft, **settings)
    except PacelineError as error:
        return [refusal("engine-refuses", error)]
    does = finding("engine-does", f"{made.version}: {made.command_line}")
    lines = (approximation.line() for approximation in made.approximations)
    return [*(finding("engine-approximates", line) for line in lines), does]


def _vllm(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What vLLM 0.32 does with its speculative config."""
    method = vllm_method(values)
    tokens = values["num_speculative_tokens"]
    yield "engine-does", f"method {method}: a chain of {tokens} tokens at every step"
    if method == "ngram" and not {"prompt_lookup_min", "prompt_lookup_max"} & set(values):
        yield "engine-approximates", "no prompt_lookup_min and _max: matches of exactly 5 tokens"
    drafts = method in ("draft_model", "eagle", "eagle3", "dflash", "dspark")
    if drafts and values.get("draft_sample_method", "greedy") == "greedy":
        text = "drafts are greedy also where requests sample; draft_sample_method=probabilistic"
        yield "engine-approximates", f"{text} is accepted more often"
    if method == "eagle3":
        yield from _layers(str(values.get("model", "")), outputs=False)


def _sglang(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What SGLang 0.5.23 does with its speculative arguments."""
    algorithm = str(values["speculative_algorithm"]).upper()
    topk = int(values.get("speculative_eagle_topk", 1))
    nodes = int(values.get("speculative_num_draft_tokens", 1)) - 1
    steps = values.get("speculative_num_steps")
    chain = steps or (f"{nodes}" if nodes else "the head's block")
    tree = f"chains of {chain}" if topk == 1 else f"the {nodes} likeliest of trees {steps} deep"
    trie = algorithm == "NGRAM"
    yield "engine-does", f"a trie, {nodes} nodes" if trie else f"{algorithm}: {tree}"
    keys = ("speculative_use_rejection_sampling", "speculative_use_block_verification")
    sampled = trie or algorithm in ("DFLASH", "DSPARK")  # its drafts carry their distributions
    if topk == 1 and not sampled and not any(values.get(key) for key in keys):
        text = "sampled drafts count only where the target draws the same token; "
        yield "engine-approximates", f"{text}--speculative-use-rejection-sampling accepts more"
    if algorithm == "EAGLE3":
        yield from _layers(str(values.get("speculative_draft_model_path", "")), outputs=True)


def _layers(model: str, outputs: bool) -> Iterator[tuple[str, str]]:
    """Which layers of the target the engine feeds to a head, as it reads the head's config."""
    config = head_config(model)
    if not config:
        return
    nested, top = config.get("eagle_config"), config.get(LAYERS)
    nested_layers = nested.get(LAYERS) if isinstance(nested, dict) else None
    layers = nested_layers if outputs else top or nested_layers
    if not layers:
        remark = " (it looks under eagle_config only)" if outputs and top else ""
        yield (
            "engine-layers-shifted" if top else "engine-does",
            f"the head names no layers that it reads{remark}: inputs of 2, n/2 and n-3 are taken",
        )
        return
    inputs = [number + 1 for number in layers] if outputs else list(layers)
    yield "engine-does", f"the head reads the inputs of layers {inputs} of the target"
    if not outputs and not top:
        text = f"{list(layers)} stand under eagle_config, where SGLang counts outputs"
        yield "engine-layers-shifted", f"{text}: vLLM takes them for inputs, one layer too early"

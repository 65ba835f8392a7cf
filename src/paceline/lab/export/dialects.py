"""The other engines. For each, a function fills in the command, the configuration and the files of
an export. It raises ConfigError for drafts without an equivalent in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.drafters import DFlash, DraftModel, DSpark, Eagle, Medusa, Mtp, NGram, Suffix
from paceline.files import render_template
from paceline.lab.export.speculation import FEWER_MATCHES, Dialect, Export, eagle_of, outputs_of
from paceline.model.gguf import gguf_file

# Methods of vLLM that draft greedily by default.
_SAMPLED = ("draft_model", "eagle3", "dflash", "dspark")


def _vllm(export: Export) -> None:
    """--speculative-config in JSON; heads in the layout of speculators."""
    config = _vllm_method(export)
    config.setdefault("num_speculative_tokens", export.length)
    if export.other_vocabulary():
        if config.get("parallel_drafting"):
            raise export.refuse("export a draft in one pass that has the target's vocabulary")
        config["use_heterogeneous_vocab"] = True  # which vLLM allows with greedy drafts alone
        cost = "fewer tokens per step, above all when sampling"
        export.approximate("a draft of another vocabulary", "only shared tokens, greedily", cost)
        if export.rule == "block":
            export.approximate("rule 'block'", "rule 'token'", cost)
    elif export.rule == "block" and config["method"] in (*_SAMPLED, "eagle"):
        config |= {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
    elif config["method"] in _SAMPLED:
        config["draft_sample_method"] = "probabilistic"
    export.config = config
    export.command = ["vllm", "serve", export.target_path, "--max-num-seqs", str(export.batch)]
    export.command += ["--speculative-config", json.dumps(config)]
    export.files["vllm.json"] = json.dumps(config, indent=2) + "\n"


def _vllm_method(export: Export) -> dict[str, Any]:
    draft = export.draft
    parallel = {"parallel_drafting": True} if export.in_one_pass() else {}
    if isinstance(draft, DraftModel):
        return {"method": "draft_model", "model": export.draft_path} | parallel
    if isinstance(draft, Eagle):
        method, layout = ("eagle3", "speculators") if draft.version == 3 else ("eagle", "eagle")
        return {"method": method, "model": export.write_eagle(draft, layout)} | parallel
    if isinstance(draft, Mtp):  # of the target, unless it names another checkpoint
        return {"method": "mtp"} | ({"model": export.draft_path} if draft.path else {})
    if isinstance(draft, Medusa):
        return {"method": "medusa", "model": export.write_medusa(draft)}
    if isinstance(draft, (DFlash, DSpark)):
        folder = export.write_block(draft, "speculators", "z-lab", "deepspec")
        return {"method": draft.kind, "model": folder}
    if isinstance(draft, Suffix):
        options: dict[str, Any] = {"max_tree_depth": draft.max_depth}
        options |= {"max_spec_factor": draft.factor, "min_token_prob": draft.min_prob}
        options |= {"max_cached_requests": 10_000 if draft.shared else 0}
        return {"method": "suffix"} | {f"suffix_decoding_{k}": v for k, v in options.items()}
    if isinstance(draft, NGram):
        if draft.candidates > 1 or draft.source != "both":
            what = f"{draft.candidates} candidates from {draft.source}"
            instead = "only the earliest match, from prompt and answer"
            export.approximate(what, instead, FEWER_MATCHES)
        limits = {"prompt_lookup_min": draft.min, "prompt_lookup_max": draft.max}
        return {"method": "ngram", **limits}
    raise export.refuse(
        "export eagle3, dflash, dspark, medusa, mtp, a draft model, ngram or suffix"
    )


def _sglang(export: Export) -> None:
    """Flags; trees by steps, top-k and tokens, chains of block drafters; heads in the published
    layout, with feature layers numbered by outputs (for EAGLE under eagle_config)."""
    draft, (levels, nodes, width) = export.draft, export.tree()
    flags: dict[str, str] = {}
    if isinstance(draft, (Eagle, DraftModel)):
        algorithm, model = "STANDALONE", export.draft_path
        if isinstance(draft, Eagle):
            algorithm = "EAGLE3" if draft.version == 3 else "EAGLE"
            model = export.write_eagle(draft, "eagle", outputs=True)
        flags |= {"algorithm": algorithm, "draft-model-path": model}
        flags |= {"num-steps": str(levels), "eagle-topk": str(width)}
        if draft.branching:
            instead = f"the {nodes} likeliest nodes of a dynamic tree"
            cost = "usually at least as many tokens per step; nodes=N here grows the same tree"
            export.approximate("a static tree", instead, cost)
        if width == 1:
            # Otherwise SGLang accepts a draft only if the target samples it: fewer are accepted.
            switch = "block-verification" if export.rule == "block" else "rejection-sampling"
            flags[f"use-{switch}"] = ""
    elif isinstance(draft, (DFlash, DSpark)):
        model = export.write_block(draft, "z-lab", "deepspec")
        nodes = export.length
        flags |= {"algorithm": draft.kind.upper(), "draft-model-path": model}
        if draft.kind == "dspark":
            flags["dspark-block-size"] = str(nodes)
        if export.rule == "block":
            flags["use-block-verification"] = ""
    elif isinstance(draft, NGram):
        depth = str(max(draft.max + export.length, 2))
        flags |= {"algorithm": "NGRAM", "ngram-max-trie-depth": depth}
        what = f"matches of {draft.min} to {draft.max} tokens in the request"
        cost = "drafts depend on other requests' texts, so acceptance differs"
        export.approximate(what, "a trie over all requests", cost)
    else:
        raise export.refuse("export eagle, eagle3, dflash, dspark, a draft model or ngram")
    flags["num-draft-tokens"] = str(nodes + 1)  # including the root
    export.command = ["python", "-m", "sglang.launch_server", "--model-path", export.target_path]
    export.command += ["--max-running-requests", str(export.batch)]
    for name, value in flags.items():
        export.command += [f"--speculative-{name}", *([value] if value else [])]
        export.config[f"speculative_{name.replace('-', '_')}"] = value or True


def _tensorrt_llm(export: Export) -> None:
    """YAML with speculative_config; feature layers numbered by outputs."""
    draft, config = export.draft, dict[str, Any](max_draft_len=export.length)
    if isinstance(draft, Eagle) and draft.version == 3:
        layers = outputs_of(eagle_of(draft, export.target).config.feature_layers)
        model = export.write_eagle(draft, "eagle")
        config |= {"decoding_type": "Eagle3", "speculative_model": model}
        config["eagle3_layers_to_capture"] = layers
    elif isinstance(draft, DraftModel):
        config |= {"decoding_type": "Draft_Target", "speculative_model": export.draft_path}
    elif isinstance(draft, NGram):
        config |= {"decoding_type": "NGram", "max_matching_ngram_size": draft.max}
        config |= {"is_keep_all": True, "is_use_oldest": False, "is_public_pool": False}
        if draft.candidates > 1:
            what = f"{draft.candidates} candidates"
            export.approximate(what, "only the newest match", FEWER_MATCHES)
    else:
        raise export.refuse("export eagle3, a draft model or ngram")
    file = "tensorrt_llm.yaml"
    export.config = {"max_batch_size": export.batch, "speculative_config": config}
    export.files[file] = json.dumps(export.config, indent=2) + "\n"  # JSON is YAML
    export.command = ["trtllm-serve", export.target_path, "--config", export.in_folder(file)]


def _llama_cpp(export: Export) -> None:
    """Flags of llama-server; GGUF files."""
    draft, draft_file = export.draft, ""
    target = _gguf(export, export.target_path, "target.gguf")
    if isinstance(draft, DraftModel):
        draft_file = _gguf(export, export.draft_path, "draft.gguf")
        flags = ["--spec-type", "draft-simple", "-md", draft_file]
    elif isinstance(draft, Eagle) and draft.version == 3:
        head, target_folder = export.write_eagle(draft, "eagle"), export.target_path
        draft_file = _gguf(export, head, "head.gguf", "--target-model-dir", target_folder)
        flags = ["--spec-type", "draft-eagle3", "-md", draft_file]
    elif isinstance(draft, NGram):
        flags = ["--spec-type", "ngram-simple"]
        flags += ["--spec-ngram-simple-size-n", str(draft.max)]
        flags += ["--spec-ngram-simple-size-m", str(export.length)]
        if draft.min < draft.max or draft.candidates > 1:
            what = f"matches of {draft.min} to {draft.max} tokens, {draft.candidates} candidates"
            instead = f"one match of exactly {draft.max}"
            export.approximate(what, instead, "fewer drafts; ngram-map-k may draft more")
    else:
        raise export.refuse("export eagle3, a draft model or ngram")
    if draft_file:
        flags += ["--spec-draft-n-max", str(export.length), "--spec-draft-n-min", "0"]
        flags += ["--spec-draft-p-min", "0"]  # as here: no chain ends early
    export.command = ["llama-server", "-m", target, "-np", str(export.batch), *flags]
    export.config = dict(zip(flags[::2], flags[1::2], strict=True))


def _gguf(export: Export, path: str, name: str, *more: str) -> str:
    """The GGUF file of a model; if there is none, a step converts the model."""
    if (file := gguf_file(path)) is not None:
        return str(file)
    convert = ["python", "convert_hf_to_gguf.py", path, *more, "--outtype", "bf16", "--outfile"]
    return export.convert(name, convert)


def _openvino(export: Export) -> None:
    """A short Python program; models converted by optimum."""
    draft = export.draft
    export.config["num_assistant_tokens"] = export.length
    target = _openvino_model(export, export.target_path, "target")
    if isinstance(draft, DraftModel):
        folder = _openvino_model(export, export.draft_path, "draft")
        speculation = f'draft_model=genai.draft_model({folder!r}, "CPU")'
    elif isinstance(draft, NGram):
        export.config["max_ngram_size"] = draft.max
        speculation = "prompt_lookup=True"
        if draft.candidates > 1 or draft.source != "prompt":
            what = f"{draft.candidates} candidates from {draft.source}"
            export.approximate(what, "one match", FEWER_MATCHES)
    else:
        raise export.refuse(
            "export a draft model or ngram (its EAGLE-3 numbers layers by outputs and reads the "
            "numbers from the converted model, so a head of ours would read one layer too far)"
        )
    file = "openvino_generate.py"
    values = {"target": repr(target), "draft": speculation, "settings": export.config}
    export.files[file] = render_template(Path(__file__).with_name("openvino.py.txt"), **values)
    export.command = ["python", export.in_folder(file), "Once upon a time"]


def _openvino_model(export: Export, path: str, name: str) -> str:
    """The folder of a converted model; a model in another format is converted by a step."""
    if (Path(path) / "openvino_model.xml").is_file():
        return path
    convert = ["optimum-cli", "export", "openvino", "--model", path, "--weight-format", "fp32"]
    return export.convert(f"{name}-openvino", convert)


DIALECTS = {
    "vllm": Dialect(
        "vllm 0.32.0", _vllm, vocabularies=True, parallel=True, rules=("token", "block")
    ),
    "sglang": Dialect("sglang 0.5.23", _sglang, trees=True, rules=("token", "block")),
    "tensorrt-llm": Dialect(
        "TensorRT-LLM 1.2 (its documented classes; it cannot be installed without a GPU)",
        _tensorrt_llm,
    ),
    "llama.cpp": Dialect(
        "llama.cpp 0.5.0-dev", _llama_cpp, vocabularies=True, rules=("token", "coupled")
    ),
    "openvino": Dialect("openvino-genai 2026.4.1", _openvino),
}

"""Keywords of other engines: mapped to ours, or refused with what to do here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from paceline.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Keywords of vLLM, llama-cpp-python and transformers: our name, or (not a name) what to do.
OTHER_NAMES = {
    **{"tensor_parallel_size": "tensor_parallel", "max_num_seqs": "max_batch_size"},
    **{"enable_prefix_caching": "prefix_sharing", "kv_cache_memory_bytes": "kv_cache_memory"},
    **{"quantization": "quantize", "speculative_config": "draft", "speculative_model": "draft"},
    **{"num_speculative_tokens": "draft_length", "max_seq_len": "max_model_len"},
    # Of ours, in the other place.
    **{"drafter": "draft", "draft": "drafter", "model": "target", "target": "model"},
    **{"n_ctx": "max_model_len", "model_path": "model"},
    **{"torch_dtype": "dtype", "device_map": "device", "assistant_model": "draft"},
    **{"sampling_params": "params", "use_tqdm": "progress", "max_new_tokens": "max_tokens"},
    **{"include_stop_str_in_output": "include_stop", "repeat_penalty": "repetition_penalty"},
    **{"num_return_sequences": "n", "stop_strings": "stop", "lora_modules": "lora"},
    "gpu_memory_utilization": 'bound the cache by kv_cache_memory="2G"',
    "cpu_offload_gb": 'use offload="cpu" and weights_memory="8G", what stays on the device',
    "n_gpu_layers": 'use device="cuda", and offload="cpu" if the weights do not fit',
    **dict.fromkeys(
        ("n_threads", "threads"), "set OMP_NUM_THREADS, or call torch.set_num_threads(N)"
    ),
    "pipeline_parallel_size": "use tensor_parallel=N: processes share each layer",
    "tokenizer": "the tokenizer is the one in the model's folder; put it there",
    "trust_remote_code": "no code of a checkpoint is run; leave it out",
    "enforce_eager": "no CUDA graphs are captured; leave it out",
    "swap_space": "no sequence is swapped out; leave it out",
    "enable_chunked_prefill": "long prompts are always read in chunks; leave it out",
    "enable_lora": "it is on; give adapters as lora={name: folder}, --lora NAME=FOLDER",
    "lora_request": 'load it with the model, LLM(lora={"sql": folder}), and name it: lora="sql"',
    "max_loras": "a batch may name any number of adapters; leave it out",
    "max_lora_rank": "ranks up to 64 are served without being announced; leave it out",
    "logits_processors": "give them to requests: SamplingParams(logits_processors=[f])",
    "structured_outputs": "use grammar=Grammar.json(schema), regex or lark",
    "guided_decoding": "use grammar=Grammar.json(schema), regex or lark",
    **dict.fromkeys(
        ("max_tokens", "temperature", "seed"),
        "give it to a request: generate(prompt, SamplingParams(max_tokens=64, temperature=0.8))",
    ),
    "best_of": "use n=N and choose among the completions",
    "bad_words": "use logit_bias={token_id: -100}, or logits_processors",
    "allowed_token_ids": "use grammar, or logits_processors",
    "do_sample": "a temperature above 0 samples; 0 is greedy",
}


def forgiving(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Have a function take the keywords of ``OTHER_NAMES``, too. ``what`` is its name in errors:
    ConfigError for a keyword that it does not know, with the nearest that it does."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = [name for name in signature(function).parameters if name != "self"]

        @wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
            for name in [name for name in keywords if name not in known]:
                ours = OTHER_NAMES.get(name, "")
                if ours not in known:
                    raise ConfigError(f"{what} has no keyword {name}; {_advice(name, known)}")
                if ours in keywords:
                    raise ConfigError(f"{what}: {name} is {ours} here; give it once")
                keywords[ours] = keywords.pop(name)
            return function(*args, **keywords)

        return call

    return decorate


def _advice(name: str, known: Iterable[str]) -> str:
    advice = OTHER_NAMES.get(name, "")
    if " " in advice:
        return advice
    return did_you_mean(name, known, f"it knows {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """The nearest of the ``known`` names as advice; ``otherwise`` where none is as like."""
    near = get_close_matches(name, known, 1, likeness)
    return f"did you mean {near[0]}?" if near else otherwise

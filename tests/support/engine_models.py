"""A random pair whose draft is often, but not always, right; and the reference forward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from paceline.core.params import SamplingParams
from paceline.llm import LLM
from paceline.model.probe import ATTENTION, register
from paceline.model.target import CausalModel
from support.recurrent_models import BY_LEVELS, RECURRENT
from support.tiny_models import SENTENCES, SMALL

VOCAB = 97


def random_llama(seed: int = 0, layers: int = 2, noise: float = 0.0, vocab: int = VOCAB) -> Any:
    """A random transformers Llama; ``noise`` perturbs the weights of the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    config = LlamaConfig(
        **SMALL | {"vocab_size": vocab, "num_hidden_layers": layers},
        max_position_embeddings=160,
        initializer_range=0.25,  # far from uniform distributions, so that wrong rows show
        attn_implementation=ATTENTION,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return model.eval()


def adapted(seed: int = 0, layers: int = 2, noise: float = 0.0) -> CausalModel:
    return CausalModel(random_llama(seed, layers, noise), f"random-{seed}")


def random_recurrent(
    name: str, seed: int = 0, noise: float = 0.0, vocab: int = VOCAB, **more: Any
) -> Any:
    """A random model with recurrent layers, as ``random_llama``."""
    import transformers

    register()
    kind, changes = (RECURRENT | BY_LEVELS)[name]
    options = SMALL | {"vocab_size": vocab, "max_position_embeddings": 160}
    config = getattr(transformers, kind)(**options | {"initializer_range": 0.25} | changes | more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = parameter.std() if parameter.numel() > 1 else 1.0
                parameter.add_(noise * spread * torch.randn_like(parameter))
    return model.eval()


def recurrent(name: str) -> CausalModel:
    return CausalModel(random_recurrent(name), name)


@torch.inference_mode()
def reference_logits(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    """float32 [n, vocab]: transformers' own forward of the whole sequence, without any cache."""
    model.hf.set_attn_implementation("sdpa")
    try:
        out: torch.Tensor = model.hf(torch.tensor([tokens]), use_cache=False).logits[0]
        return out.float()
    finally:
        model.hf.set_attn_implementation(ATTENTION)


def write_pair(root: Path, noise: float = 0.15) -> tuple[str, str]:
    """Folders of a random target and of the same model with noise, with a shared tokenizer."""
    from embedded_target import train_tokenizer

    tokenizer = train_tokenizer(SENTENCES, 320)
    folders = []
    for name, level in (("target", 0.0), ("draft", noise)):
        folder = root / name
        random_llama(3, 2, level, len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


def cramped(target: str, spec: str, blocks: int, models: int = 2, **options: Any) -> LLM:
    """An engine whose cache, of so many models of ``write_pair``, cannot hold five sequences."""
    per_token = 2 * (2 * 2 * 8) * 4  # layers x kv heads x (key + value) x float32
    options["kv_cache_memory"] = 16 * blocks * models * per_token
    llm = LLM(target, spec, dtype="float32", draft_length=3, **options)
    llm.engine.scheduler.config = type(llm.engine.scheduler.config)(
        max_batch_size=5, prefill_chunk=3, max_step_tokens=7, max_positions=160
    )
    return llm


def drawn_pairs(target: str, spec: str | None) -> Counter[tuple[int, ...]]:
    """The first two tokens of 400 runs, out of at most nine pairs; the engine's seed is fixed."""
    params = SamplingParams(max_tokens=2, temperature=1.0, top_k=3, ignore_eos=True, n=400)
    llm = LLM(target, spec, dtype="float32", draft_length=2, max_batch_size=200, seed=3)
    done = llm.generate("The quick brown fox", params)
    return Counter(tuple(completion.token_ids) for completion in done)


def check_one_distribution(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> None:
    """A two-sample chi-square; with 8 degrees of freedom 27.9 is the 0.05 % point."""
    pairs = one.keys() | other.keys()
    assert len(pairs) <= 9
    assert sum((one[p] - other[p]) ** 2 / (one[p] + other[p]) for p in pairs) < 27.9

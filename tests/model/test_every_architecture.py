"""Every causal architecture of transformers through the engine, beside its own ``generate``.

Three requests in one batch, prompts in chunks, n-gram drafts, shared blocks, both backends; the
library generates them one by one. Equal, or refused with the reason: a model type that is new in
transformers is tested by itself, and fails here if it is neither. Those of the native kernels, a
model for each way to attend and one for each reason are tested with every change, all with the slow
ones.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import VOCAB, cases, kinds, tiny_config
from transformers import AutoModelForCausalLM

from paceline.build import EngineOptions, build_engine, seeded_generator
from paceline.core.adapter import Adapter
from paceline.core.batch import Span
from paceline.core.params import SamplingParams, TokenLogprob
from paceline.draft.spec import LoadContext
from paceline.drafters import parse_draft, prepare_one
from paceline.engine.driver import Drive, sequence
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.backends.base import NATIVE, REFERENCE
from paceline.model.backends.reference.recurrent import Mixer
from paceline.model.copies import layer_view, quantised_copy
from paceline.model.loading import causal_class, check_architecture
from paceline.model.lora import linear_sizes
from paceline.model.probe import ATTENTION, probe_batch, register
from paceline.model.target import CausalModel

NEW = 12  # tokens
TOLERANCE = 5e-4  # of the spread of a row's logits; rounding stays below 1e-4 of it
OPTIONS = EngineOptions(draft_length=3, max_batch_size=3)

_REFUSED = {
    "is an encoder-decoder model": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
        "prophetnet whisper"
    ),
    "whose state cannot be rolled back": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text falcon_mamba glm_moe_dsa hy_v4 "
        "mamba mamba2 qwen4_exp qwen4_exp_text rwkv xlstm"
    ),
    "do not go through the attention interface": (
        "big_bird bloom blt codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj "
        "megatron-bert mpt openai-gpt reformer rembert roformer trocr xglm xlm xlnet"
    ),
    "did not go through the attention interface": "hrm_text minimax mllama",
    # Where transformers (up to 5.20) lists its layers, they are refused before it runs.
    "did not go through the attention interface|has recurrent layers": "recurrent_gemma",
    "more than once through the attention interface": "diffllama zamba2",
    "a recurrence that returns more than hidden states": "zaya",
    "gives attention a position_bias": "inkling2_text inkling_text",
    "numbers positions from its padding token": (
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
    ),
    "makes the attention mask from the text": "doge",
    "mask is a table of the tokens": "gemma4_unified",
    "attention is bidirectional": "gemma3_text:embedding",
    "has no window, but its cache": "moshi",
}
REFUSED = {case: reason for reason, names in _REFUSED.items() for case in names.split()}
# What no tiny model of can be made of the class's default.
UNBUILT = {
    "gemma3n": "timm",  # a package, for the tower of images
    "gemma4_assistant": "hidden_size_per_layer_input|vocab_size",
    # Has no keys of its own; what transformers 5.20 builds of it is refused.
    "gemma4_unified_assistant": "layer types|vocab_size|shared_kv_states",
    "musicgen": "text_encoder|is an encoder-decoder",  # transformers 5.17 wants its parts first
    "musicgen_melody": "text_encoder|is an encoder-decoder",
    "zamba": "tie_weights_keys",  # with so few layers
}
# Where generate is not the model: as a text passes the original length it goes on with keys rotated
# for a short one, or (Phi-4 multimodal; transformers 5.17 with all of Phi) without the text.
WHOLE = {"llama:longrope", "minicpm3", "phi3", "phi4_multimodal", "phimoe"}
KERNELS = {
    *("cwm", "gemma2", "gemma3_text", "granite", "internlm3", "iquestcoder", "llama", "ministral"),
    *("mistral", "mixtral", "qwen2", "qwen3", "seed_oss", "granite:3"),
    *("gemma2:27B", "gemma3_text:4B", "llama:3.1", "llama:linear", "llama:yarn", "llama:biased"),
    *("llama:tied", "mistral:0.3", "mixtral:window", "qwen2:yarn", "qwen2:window", "qwen3:yarn"),
    *("qwen3_moe:yarn", "qwen3_moe:dense"),
    *("ernie4_5", "gemma", "glm", "glm4", "helium", "phi3", "phi3:window", "smollm3"),
    *(
        "gpt_oss",
        "gpt_oss:20B",
        "exaone4",
        "exaone4:32B",
        "ministral3",
        "olmo2",
        "olmo3",
        "olmo3:32B",
    ),
    *("mellum", "smollm3:yarn", "llama:longrope", "phi3:3.5", "phi3:4-mini"),
}


# What torch runs: learnt and partly rotated positions, one latent for all keys,
# windows, chunks, shared keys, experts, and every recurrence.
ON_TORCH = {
    *("gpt2", "opt", "gpt_neox", "phi", "stablelm", "cohere2", "deepseek_v3"),
    *("gemma3n_text", "gemma4_text", "llama4_text", "qwen3_moe", "bamba", "jamba", "lfm2"),
    *("qwen3_next", "llama:dynamic"),
}
# Layers whose weight the module above them may multiply by itself: routers', and some of images.
READ = {"classifier", "wg", "out_proj"}
OFTEN = KERNELS | ON_TORCH | {names.split()[0] for names in _REFUSED.values()} | {*UNBUILT}


@dataclass
class Answer:
    """New tokens, and what is known of the logits by the index of the token they follow."""

    tokens: list[int]
    scores: dict[int, TokenLogprob] = field(default_factory=dict)


def random_model(config: Any) -> Any:
    """transformers' module with weights that make every part of it matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sinks, biases and norms are not constant, either
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts() -> list[list[int]]:
    """Longer than what a rotary embedding was stretched from, shorter, and passing it."""
    rng = random.Random(1)
    words = [rng.randrange(3, VOCAB) for _ in range(40)]
    long = words[:20] + words
    return [long, words[31:], long[:36] + words[:6]]


@torch.inference_mode()
def alone(model: Any, prompt: list[int], whole: bool) -> tuple[list[int], torch.Tensor]:
    """What the library generates, and log-probabilities ``[prompt + new - 1, vocab]``."""
    ids = torch.tensor([prompt])
    first = model(ids, use_cache=False).logits[0]
    if whole:
        rows = first
        for _ in range(NEW):
            ids = torch.cat((ids, rows[-1:].argmax(-1)[None]), 1)
            rows = torch.cat((rows, model(ids, use_cache=False).logits[0, -1:]))
        return ids[0, len(prompt) :].tolist(), rows.log_softmax(-1)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{"do_sample": False, "max_new_tokens": NEW},
        **{"return_dict_in_generate": True, "output_logits": True},
    )
    rows = torch.cat((first[:-1], *out.logits))
    return out.sequences[0, len(prompt) :].tolist(), rows.log_softmax(-1)


def adapted(model: Any, backend: str) -> CausalModel:
    """The same weights as engines take them."""
    register()
    weights: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    module = copy.deepcopy(model, weights)
    module.set_attn_implementation(ATTENTION)
    target = CausalModel(module, "tiny")
    target.requested_backend = backend
    return target.use_requested_backend()


def together(target: CausalModel) -> list[Answer]:
    """All prompts in one batch; the last shares blocks, so its prompt is not scored."""
    draft = prepare_one(parse_draft("ngram"), LoadContext(target, None, "float32"))
    engine = build_engine(target, draft, OPTIONS, seeded_generator(target.device, 0))
    engine.scheduler.config = replace(engine.scheduler.config, prefill_chunk=16)
    asked = {"max_tokens": NEW, "ignore_eos": True, "logprobs": 20}
    seqs = [
        sequence(prompt, SamplingParams(**asked, prompt_logprobs=None if place == 2 else 20))
        for place, prompt in enumerate(prompts())
    ]
    answers = {seq.seq_id: Answer([]) for seq in seqs}
    with Drive(engine, seqs) as drive:
        for commit in (commit for step in drive for commit in step.commits):
            assert commit.error is None, commit.error
            scores = answers[commit.seq_id].scores
            scores.update(enumerate(commit.prompt_logprobs or (), commit.position))
            behind = commit.position + commit.scheduled - 1
            scores.update(enumerate(commit.logprobs or (), behind))
    assert drive.counts.drafted > 0
    for seq in seqs:
        answers[seq.seq_id].tokens = seq.tokens[seq.prompt_length :]
    return list(answers.values())


def check(prompt: list[int], answer: Answer, wanted: list[int], rows: torch.Tensor) -> None:
    """Distributions at every position as far as the texts are the same; they part at ties only."""
    spread = rows.std(-1).clamp_min(1e-6)
    pairs = zip(answer.tokens, wanted, strict=True)
    same = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), NEW)
    last = len(prompt) - 1 + same
    if same < NEW:
        behind = float(rows[last].max() - rows[last, answer.tokens[same]])
        assert behind < TOLERANCE * spread[last], f"new token {same} is another one"
    seen = {index: score for index, score in answer.scores.items() if index <= last}
    assert len(seen) >= same
    for index, score in seen.items():
        ids, logprobs = zip(*score.top, (score.token_id, score.logprob), strict=True)
        error = (torch.tensor(logprobs) - rows[index, list(ids)]).abs().max() / spread[index]
        assert error < TOLERANCE, f"logits behind token {index} are {float(error):.1e} off"


def check_views(target: CausalModel) -> None:
    """Each layer can be left out, or is refused, whatever was left out before."""
    for layer in range(target.num_layers):
        rest = [n for n in range(target.num_layers) if n != layer]
        with contextlib.suppress(UnsupportedModelError), torch.inference_mode():
            layer_view(target, rest)(probe_batch((1,)), target.new_cache(1, 2))


@torch.inference_mode()
def check_adapter(target: CausalModel, model: Any) -> None:
    """One of all linear layers does to the rows that ask for it what merging it does."""
    torch.manual_seed(1)
    layers, tied = dict(model.named_modules()), model.get_input_embeddings().weight
    pairs = {}
    for name in layers:
        if (sizes := linear_sizes(name, target.hf)) and layers[name].weight is not tied:
            a, b = torch.randn(2, sizes[0]), torch.randn(sizes[1], 2)
            pairs[name] = a / sizes[0] ** 0.5, 0.1 * b
    for name in list(pairs):
        parent, _, layer = name.rpartition(".")
        if layer not in READ and not isinstance(target.hf.get_submodule(parent), Mixer):
            continue
        with contextlib.suppress(ConfigError):
            target.backend.check_adapter(Adapter("one", "", {name: pairs[name]}))
            continue
        del pairs[name]
    adapter = Adapter("all", "", pairs)
    target.backend.check_adapter(adapter)
    texts, cache = prompts()[1:], target.new_cache(16, 16, slots=4)
    for seq_id, tokens in enumerate(texts):
        cache.admit(seq_id, (), False)
        cache.reserve(seq_id, len(tokens))
    spans = [Span.of(n, 0, text, adapter=(adapter, None)[n]) for n, text in enumerate(texts)]
    rows = target(cache.batch_of(spans), cache).logits
    plain = [model(torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts]
    before = {name: layers[name].weight.clone() for name in pairs}
    for name, (a, b) in pairs.items():
        added = b @ a if isinstance(layers[name], torch.nn.Linear) else (b @ a).T
        layers[name].weight += added
    merged = model(torch.tensor([texts[0]]), use_cache=False).logits[0, -1]
    for name, weight in before.items():
        layers[name].weight.copy_(weight)
    for row, wanted in zip(rows, (merged, plain[1]), strict=True):
        assert (row - wanted).abs().max() < TOLERANCE * wanted.std()
    assert (merged - plain[0]).abs().max() > 0.01 * merged.std()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in OFTEN else pytest.mark.slow) for c in cases()],
)
def test_equal_or_refused(case: str) -> None:
    kind = case.partition(":")[0]
    if kind in UNBUILT:
        if UNBUILT[kind] == "timm" and find_spec("timm"):
            pytest.skip("timm is installed, so the model can be built; its images were never run")
        with pytest.raises(Exception, match=UNBUILT[kind]):
            check_architecture(kinds()[kind]())
            adapted(random_model(tiny_config(case)), REFERENCE)
        return
    reason = REFUSED.get(case) or REFUSED.get(kind)
    if reason is not None:
        with pytest.raises(UnsupportedModelError, match=reason):
            check_architecture(kinds()[kind]())
            adapted(random_model(tiny_config(case)), REFERENCE)
        return
    config = tiny_config(case)
    check_architecture(config)
    model = random_model(config)
    saved = copy.copy(model.config)  # as it is written: of some it is another kind's
    saved.architectures = [type(model).__name__]
    assert causal_class(saved) is type(model)
    wanted = [alone(model, prompt, not WHOLE.isdisjoint({kind, case})) for prompt in prompts()]
    for backend in (REFERENCE, NATIVE):
        target = adapted(model, backend)
        if backend == NATIVE:
            assert (target.backend.name == NATIVE) == (case in KERNELS), target.backend_refusal
        if target.backend.name == backend:
            for prompt, answer, truth in zip(prompts(), together(target), wanted, strict=True):
                check(prompt, answer, *truth)
            check_adapter(target, model)
            quantised_copy(target, "int4")
            check_views(target)


def test_each_name_is_that_of_a_case() -> None:
    """Of the lists, but for types that only transformers 5.23 has."""
    new = {"dots3_note", "dots3_note_text", "inkling2_text"}
    new |= {"internlm3", "iquestcoder", "recurrent_gemma"}
    assert {*REFUSED, *OFTEN, *WHOLE} - {*cases()} <= new


def test_the_documentation_lists_what_is_tested() -> None:
    """Of the types that this transformers has; a row that is none of three gives a refusal."""
    page = Path(__file__).parents[2] / "docs" / "get-started" / "models.md"
    section = page.read_text(encoding="utf-8").partition("## Architectures\n")[2]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section.partition("\n## ")[0], re.M)
    listed = {what: {*re.findall(r"`([\w-]+)`", names)} & {*kinds()} for what, names in rows}
    refused = {*kinds()} & {*REFUSED}
    native = {*kinds()} & {*KERNELS}
    unbuilt = {*kinds()} & {*UNBUILT}
    assert listed.pop("native kernels") == native
    assert listed.pop("torch") == {*kinds()} - native - refused - unbuilt
    assert listed.pop("not tested") == unbuilt
    assert set().union(*listed.values()) == refused

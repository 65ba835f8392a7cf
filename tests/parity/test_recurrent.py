"""Models with recurrent layers, of every family: drafted, shared, preempted and undone, they write
what plain decoding does, and that is what transformers' ``generate`` does."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import pytest
import torch

from embedded_target import train_tokenizer
from paceline.core.batch import Batch, Span
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.drafters import DRAFTERS
from paceline.errors import ConfigError, ModelLoadError
from paceline.llm import LLM
from paceline.model.backends.reference.recurrent import Mixer
from paceline.model.loading import read_config
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.target import CausalModel
from paceline.request.completion import Completion
from support.cache_invariants import check_cache
from support.diagonal import diagonal
from support.engine_models import random_llama, random_recurrent
from support.every_drafter import write_texts
from support.faults import STAGES, Fault
from support.made_adapters import write_adapter, write_merged
from support.medusa_models import write_medusa
from support.mtp_models import write_mtp
from support.random_heads import write_block, write_eagle
from support.recurrent_models import BY_LEVELS, RECURRENT
from support.tiny_models import SENTENCES

TREE = "tree:{draft}"
EXAMPLES = ["model:{llama}"]
EXAMPLES += [one for kind in DRAFTERS if kind != "none" for one in DRAFTERS[kind].examples]
KINDS = sorted(RECURRENT)  # those with the same recurrence stand next to each other
# Every example of every drafter meets a family in each run, and all of them in the slow tests.
CASES = diagonal(KINDS, EXAMPLES)
_WITH_MTP = "qwen3"  # families whose checkpoints hold MTP layers of a form that is read
WORDS = [7, 3, 9, 11, 2, 5, 6, 1, 13, 17, 19, 23, 4, 8, 15, 16, 7, 3, 9, 11, 2, 5, 6, 1]
_HEADS_FOLLOW = ("bamba", "granitemoehybrid")  # heads times their width are twice the hidden size
PROMPTS = [WORDS * 2, WORDS[:11], [*WORDS[:17], 3, 3], [5]]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=5, n=2)
# Of four tokens some come again, whatever a random model says.
FEW = replace(GREEDY, logit_bias=dict.fromkeys(range(4, 8), 100.0))


class Family:
    """A target of a family, what it writes and what drafts for it, made when first asked for."""

    def __init__(self, kind: str, root: Path) -> None:
        self._kind, self._root = kind, root
        root.mkdir()

    @cached_property
    def folders(self) -> dict[str, str]:
        tokenizer = train_tokenizer(SENTENCES, 320)
        size = len(tokenizer)
        made = {
            "target": random_recurrent(self._kind, 3, 0.0, size),
            "draft": random_recurrent(self._kind, 3, 0.1, size),
            "llama": random_llama(3, 2, 0.0, size),
        }
        for name, module in made.items():
            module.save_pretrained(self._root / name)
            tokenizer.save_pretrained(self._root / name)
        return {name: str(self._root / name) for name in made}

    @cached_property
    def plain(self) -> LLM:
        return LLM(self.folders["target"], draft="none", dtype="float32")

    @cached_property
    def expected(self) -> list[list[int]]:
        return [out.token_ids for out in answers(self.plain, GREEDY, SEEDED)]

    @cached_property
    def few(self) -> list[int]:
        return self.plain.generate(WORDS, FEW)[0].token_ids

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.folders, self.expected, self._root)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("families")
    return {kind: Family(kind, root / kind) for kind in (*KINDS, *BY_LEVELS)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folders(families: dict[str, Family], kind: str) -> dict[str, str]:
    return families[kind].folders


@pytest.fixture
def plain(families: dict[str, Family], kind: str) -> LLM:
    return families[kind].plain


@pytest.fixture
def expected(families: dict[str, Family], kind: str) -> list[list[int]]:
    return families[kind].expected


@pytest.fixture
def weights(families: dict[str, Family], kind: str) -> Weights:
    return families[kind].weights


class Weights(dict[str, str]):
    """Folders by the names in drafters' examples; those of heads are made when asked for."""

    def __init__(self, folders: dict[str, str], texts: list[list[int]], root: Path) -> None:
        super().__init__(folders)
        self._texts, self._root = texts, root

    def __missing__(self, name: str) -> str:
        root, target = self._root, self["target"]
        makers = {
            "datastore": lambda: write_texts(root, target, PROMPTS + self._texts),
            "medusa": lambda: write_medusa(root / "medusa", target, steps=5),
            "mtp": lambda: write_mtp(root / "mtp", read_config(target, target), "qwen3_next"),
            "eagle": lambda: write_eagle(root, target, 1),
            "eagle3": lambda: write_eagle(root, target, 3),
        }
        self[name] = makers.get(name, lambda: write_block(root, target, name))()
        return self[name]


def answers(llm: LLM, *asked: SamplingParams) -> list[Completion]:
    """Behind them the cache is whole, and nothing is kept."""
    scheduler = llm.engine.scheduler
    scheduler.config = replace(scheduler.config, prefill_chunk=16)
    made = [out for params in asked for out in llm.generate(PROMPTS, params)]
    check_cache(llm.engine.cache)
    assert llm.engine.cache.pool.available == llm.engine.cache.num_blocks
    return made


def test_plain_text_is_that_of_generate(plain: LLM, expected: list[list[int]]) -> None:
    """Greedy, and with our noise on transformers' logits."""
    hf = type(plain.target.hf).from_pretrained(plain.target.name, dtype=torch.float32)
    hf.generation_config.eos_token_id = None  # Bamba names one, and ours ignores it

    def noisy(seed: int, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        noise = gumbel([seed], [ids.shape[1]], logits.shape[1])
        return logits / SEEDED.temperature + noise

    copies = [(prompt, copy) for prompt in PROMPTS for copy in range(SEEDED.n)]
    seeded = [(prompt, [partial(noisy, SEEDED.seed + copy)]) for prompt, copy in copies]
    for (prompt, chosen), ours in zip(
        [*((prompt, []) for prompt in PROMPTS), *seeded], expected, strict=True
    ):
        theirs = hf.generate(
            torch.tensor([prompt]),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            logits_processor=chosen,
        )
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("kind", "example"), CASES, indirect=["kind"])
def test_drafted_text_is_plain_text(
    families: dict[str, Family],
    plain: LLM,
    weights: Weights,
    expected: list[list[int]],
    kind: str,
    example: str,
) -> None:
    if "{mtp}" in example and _WITH_MTP not in kind:
        with pytest.raises(ModelLoadError, match="has no MTP layer: its files hold neither"):
            plain.with_draft("mtp")
        return
    llm = plain.with_draft(example.format_map(weights), draft_length=4)
    made = answers(llm, GREEDY, SEEDED)
    assert [out.token_ids for out in made] == expected
    again = answers(llm, GREEDY)
    assert [out.token_ids for out in again] == expected[: len(PROMPTS)]
    assert again[0].stats.cached_tokens == 32  # a prefix is found again, with its state
    few = llm.generate(WORDS, FEW)
    assert few[0].token_ids == families[kind].few
    assert sum(out.stats.drafted_tokens for out in made + again + few) > 0


@pytest.mark.parametrize("kind", ["bamba", "qwen3_5_text"], indirect=True)
def test_kept_states_are_bounded(plain: LLM) -> None:
    """Those of the oldest prompts are dropped, and their texts are read again."""
    llm = plain.with_draft("ngram", max_batch_size=1)
    states = llm.engine.cache.states
    assert states is not None
    total = states.pool.total
    prompts = [[number, *WORDS, *WORDS] for number in range(20, 20 + total)]
    params = replace(GREEDY, max_tokens=3)
    made = llm.generate(prompts, params)
    assert states.pool.total == total
    newest, oldest = (llm.generate([prompts[n]], params)[0] for n in (-1, 0))
    assert newest.stats.cached_tokens == 48 and oldest.stats.cached_tokens == 0
    assert [oldest.token_ids, newest.token_ids] == [made[0].token_ids, made[-1].token_ids]
    check_cache(llm.engine.cache)


def test_a_request_s_adapter_is_as_if_merged(
    plain: LLM, folders: dict[str, str], expected: list[list[int]], tmp_path: Path, kind: str
) -> None:
    draft = ("ngram", TREE)[KINDS.index(kind) % 2]
    modules = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_qkvz")
    modules += ("out_proj", "q_proj", "o_proj", "w1", "w2", "up_proj", "down_proj", "output_linear")
    one = write_adapter(tmp_path / "one", folders["target"], modules=modules)
    merged = LLM(write_merged(tmp_path / "merged", folders["target"], one), "none", dtype="float32")
    llm = plain.with_draft(draft.format(**folders), draft_length=4)
    llm.adapters.load("one", one, replace=True)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    theirs = merged.generate(PROMPTS, GREEDY)
    for _ in range(2):  # with shared prefixes, too
        names = ["one", None] * len(PROMPTS)
        made = llm.generate(prompts, [replace(GREEDY, lora=name) for name in names])
        assert [out.token_ids for out in made[1::2]] == expected[: len(PROMPTS)]
        assert [out.token_ids for out in made[::2]] == [out.token_ids for out in theirs]
    assert [out.token_ids for out in theirs] != expected[: len(PROMPTS)]
    check_cache(llm.engine.cache)


def test_all_levels_step_in_one_call_in_bf16(kind: str) -> None:
    """Where transformers' own steps round more often than ours."""
    wide = {"hidden_size": 256} | ({"mamba_n_heads": 32} if kind in _HEADS_FOLLOW else {})
    model = CausalModel(random_recurrent(kind, **wide).bfloat16(), kind)
    mixers = [module for module in model.hf.modules() if isinstance(module, Mixer)]
    assert mixers and all(mixer.steps_batched for mixer in mixers)


@torch.inference_mode()
def test_rows_of_all_levels_step_in_one_call(plain: LLM, folders: dict[str, str]) -> None:
    """And what they give is what they give level by level, but for rounding."""
    mixers = [module for module in plain.target.hf.modules() if isinstance(module, Mixer)]
    assert all(mixer.steps_batched for mixer in mixers)
    cache = plain.target.new_cache(8, 16)
    prompt = Span(0, 0, 0, 20)
    tree = Span(0, 0, 20, 1, parents=(-1, -1, 0, 0, 2, 1))
    plain.target(Batch(WORDS[:20], range(20), range(20), (prompt,), ((0, 1),)), cache)
    batch = Batch(WORDS[:7], [20, 21, 21, 22, 22, 23, 22], range(20, 27), (tree,), ((0, 1),))
    together = plain.target(batch, cache).logits
    for mixer in mixers:
        mixer.steps_batched = False
    apart = plain.target(batch, cache).logits
    for mixer in mixers:
        mixer.steps_batched = True
    assert torch.allclose(together, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "params"),
    diagonal(["jamba", "kimi_linear"], [GREEDY, replace(GREEDY, temperature=0.9, seed=5)]),
    indirect=["kind"],
)
def test_adapters_of_a_recurrences_projections(
    plain: LLM,
    folders: dict[str, str],
    tmp_path: Path,
    kind: str,
    params: SamplingParams,
) -> None:
    """Several in one ragged batch, with every shape of drafts."""
    modules = {"jamba": ("in_proj", "out_proj"), "kimi_linear": ("f_a_proj", "f_b_proj", "o_proj")}
    inner = {"jamba": "x_proj", "kimi_linear": "g_b_proj"}[kind]
    adapter = write_adapter(tmp_path / "inner", folders["target"], modules=(inner,), seed=0, size=1)
    with pytest.raises(ConfigError, match=f"{inner}, which .* multiplies by itself"):
        plain.adapters.load("inner", adapter)
    llms = [plain.with_draft(draft.format(**folders), draft_length=4) for draft in ("ngram", TREE)]
    texts = [[out.token_ids for out in plain.generate(PROMPTS, params)]]
    for name, seed in (("one", 0), ("two", 1)):
        options = {"modules": modules[kind], "seed": seed, "size": 0.6}
        adapter = write_adapter(tmp_path / name, folders["target"], **options)
        for llm in llms:
            llm.adapters.load(name, adapter, replace=True)
        merged = write_merged(tmp_path / f"merged {name}", folders["target"], adapter)
        llm = LLM(merged, "none", dtype="float32")
        texts.append([out.token_ids for out in llm.generate(PROMPTS, params)])
        llm.close()
    assert len({str(text) for text in texts}) == 3
    prompts = [prompt for prompt in PROMPTS for _ in texts]
    for llm in llms:
        for _ in range(2):  # with shared prefixes, too
            names = [None, "one", "two"] * len(PROMPTS)
            made = llm.generate(prompts, [replace(params, lora=name) for name in names])
            assert [[out.token_ids for out in made[n::3]] for n in range(3)] == texts
        check_cache(llm.engine.cache)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *((kind, stage) for kind in ("bamba", "jamba", "lfm2") for stage in ("move", "preemption")),
        *(("qwen3_5_text", stage) for stage in [*STAGES, "preemption"]),
    ],
    indirect=["kind"],
)
def test_undone_steps_leave_the_text(
    plain: LLM, folders: dict[str, str], expected: list[list[int]], stage: str
) -> None:
    """Of four sequences a step fails at this stage, or the youngest has to give way."""
    llm = plain.with_draft("tree:{draft},nodes=6,width=3".format(**folders), draft_length=4)
    owner, name = STAGES["reserve" if stage == "preemption" else stage](llm)
    error = OutOfBlocksError if stage == "preemption" else RuntimeError
    fault = Fault(owner, name, lambda fault, *_: fault.calls in (3, 7), error("planted"))
    made = llm.generate(PROMPTS, GREEDY)
    assert fault.raised and [out.token_ids for out in made] == expected[: len(PROMPTS)]
    check_cache(llm.engine.cache)

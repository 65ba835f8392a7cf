"""A target on two ranks says what it says in one process, and never hangs."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from paceline import LLM, SamplingParams
from paceline.core import children
from paceline.core.batch import Batch, Span
from paceline.errors import ConfigError, EngineLostError, ModelLoadError, PacelineError
from paceline.lab.doctor import examine
from paceline.parallel import group, processes
from paceline.parallel.group import BatchOrder
from support.cache_invariants import check_cache
from support.engine_models import write_pair
from support.made_adapters import write_adapter
from support.medusa_models import write_medusa
from support.model_folders import write_gpt2
from support.random_heads import write_block, write_eagle
from support.served_process import ServedProcess

MEMORY = 1 << 20
PROMPTS = ["Once upon a time", "def add(a, b):\n    return"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
SPECS = (
    "none",
    "model:{draft}",
    "tree:{draft},branching=2x2x1",
    "eagle:{eagle}",
    "eagle3:{eagle3},nodes=6",
    "medusa:{medusa}",
    "dspark:{dspark}",
)


class Twins(NamedTuple):
    """The same model in one process and on two ranks; ``read``: bytes that rank 0 read of it."""

    alone: LLM
    shared: LLM
    folders: dict[str, str]
    read: int


@pytest.fixture(scope="module")
def twins(pair_room: tuple[Path, dict[str, str]]) -> Iterator[Twins]:
    root, pair = pair_room
    heads = {
        "eagle": write_eagle(root, pair["target"], 1),
        "eagle3": write_eagle(root, pair["target"], 3),
        "dflash": write_block(root, pair["target"], "dflash"),
        "dspark": write_block(root, pair["target"], "dspark"),
        "medusa": write_medusa(root / "medusa", pair["target"], shared=True, steps=5),
    }
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": MEMORY, "draft_length": 3}
    alone = LLM(pair["target"], "none", backend="reference", **options)
    with pytest.MonkeyPatch.context() as patch:
        counts = counted(patch)
        shared = LLM(pair["target"], "none", tensor_parallel=2, **options)
    yield Twins(alone, shared, pair | heads, sum(counts))
    shared.close()
    alone.close()


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every slice of a checkpoint that transformers takes from now on."""
    import transformers.modeling_utils as library

    counts: list[int] = []
    opened = library.safe_open

    class Part:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __getitem__(self, index: Any) -> Any:
            weights = self._inner[index]
            counts.append(weights.nbytes)
            return weights

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._inner = opened(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __enter__(self) -> Any:
            return self._inner.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._inner.__exit__(*error)

        def get_slice(self, key: str) -> Part:
            return Part(self._inner.get_slice(key))

    patch.setattr(library, "safe_open", File)
    return counts


def said(llm: LLM, spec: str | None, **options: Any) -> list[list[int]]:
    """Greedy and seeded answers, in one batch; behind them the cache is whole and empty."""
    own = llm.with_draft(spec, draft_length=3, **{"kv_cache_memory": MEMORY, **options})
    done = own.generate(PROMPTS, [GREEDY, SEEDED])
    check_cache(own.engine.cache)
    assert own.engine.cache.pool.available == own.engine.cache.num_blocks
    assert [completion.error for completion in done] == [None, None]
    return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def expected(twins: Twins) -> list[list[int]]:
    return said(twins.alone, None)


@pytest.mark.parametrize("spec", SPECS)
def test_the_text_is_that_of_one_process(
    twins: Twins, expected: list[list[int]], spec: str
) -> None:
    assert said(twins.shared, spec.format(**twins.folders)) == expected


def test_a_cache_in_8_bits_is_that_of_one_process(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's codes are its own, so it makes no difference on which rank they are made."""
    for llm in (twins.alone, twins.shared):
        monkeypatch.setattr(llm.target, "cache_dtype", torch.int8)
    wanted = said(twins.alone, None)
    for spec in ("none", "tree:{draft},branching=2x2x1"):
        assert said(twins.shared, spec.format(**twins.folders)) == wanted


def test_each_rank_has_half_of_the_heads_and_reads_half_of_the_weights(twins: Twins) -> None:
    whole, own = twins.alone.target.cache_shapes, twins.shared.target.cache_shapes
    assert [(2 * heads, k, v) for heads, k, v in own] == whole
    weights = (Path(twins.folders["target"]) / "model.safetensors").stat().st_size
    # Norms are whole on each rank and, up to transformers 5.20, the embedding.
    assert 0.4 * weights < twins.read < 0.66 * weights


def test_the_cache_has_the_least_memory_of_all_ranks(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on one processor have half of its memory each."""
    monkeypatch.setattr(group, "free_memory", lambda device: 1 << 22)
    assert twins.shared.target.free_memory() == 1 << 21
    monkeypatch.setattr(group, "free_memory", lambda device: 1 << 60)
    others = twins.shared.target.free_memory()
    assert 1 << 21 < others < 1 << 50, "it is the other rank that has less"


def test_prefixes_are_shared(twins: Twins) -> None:
    llms = [
        llm.with_draft("ngram", draft_length=3, kv_cache_memory=MEMORY)
        for llm in (twins.alone, twins.shared)
    ]
    prompts = [[7 + n % 90 for n in range(40)] + [last] for last in (5, 6)]
    one, other = ([llm.generate(prompt, GREEDY)[0] for prompt in prompts] for llm in llms)
    assert [done.token_ids for done in other] == [done.token_ids for done in one]
    assert other[1].stats.cached_tokens == one[1].stats.cached_tokens >= 32


def test_a_preempted_sequence_is_read_again(twins: Twins) -> None:
    params = [replace(own, max_tokens=28) for own in (GREEDY, SEEDED, GREEDY)]
    prompts = [*PROMPTS, "What is 12 + 30?"]
    memory = 16 * 5 * 2 * (2 * 2 * 8) * 4  # five blocks of the model in one process
    spec = f"model:{twins.folders['draft']}"
    texts = []
    for llm, share in ((twins.alone, 2), (twins.shared, 1.5)):  # the draft's cache is whole
        tight = llm.with_draft(spec, draft_length=3, kv_cache_memory=int(memory * share))
        texts.append([done.token_ids for done in tight.generate(prompts, params)])
        assert tight.engine.scheduler.preemptions > 0
    assert texts[0] == texts[1]


def test_a_cancelled_request_leaves_nothing_behind(twins: Twins, expected: list[list[int]]) -> None:
    spec = f"model:{twins.folders['draft']}"
    own = twins.shared.with_draft(spec, draft_length=3, kv_cache_memory=MEMORY)
    stream = own.stream(PROMPTS, [GREEDY, SEEDED])
    next(stream)
    stream.close()
    assert own.engine.cache.pool.available == own.engine.cache.num_blocks
    again = own.generate(PROMPTS, [GREEDY, SEEDED])
    assert [done.token_ids for done in again] == expected


def test_a_part_of_the_target_cannot_draft(twins: Twins) -> None:
    with pytest.raises(ConfigError, match="2 ranks cannot draft with a part of its own layers"):
        twins.shared.with_draft("early_exit:layers=1")
    with pytest.raises(ConfigError, match=r"not all here \(on 2 ranks\)"):
        twins.shared.with_draft("quantized:int4")


def test_adapters_are_refused(twins: Twins, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", twins.folders["target"])
    with pytest.raises(ConfigError, match="2 ranks runs no adapters; leave tensor_parallel out"):
        twins.shared.adapters.load("one", folder)


def test_ranks_of_one_model_at_a_time(twins: Twins) -> None:
    with pytest.raises(ConfigError, match="close that first"):
        LLM(twins.folders["target"], draft="none", tensor_parallel=2)


def test_a_rank_that_dies_ends_what_runs(twins: Twins) -> None:
    """The last test on these ranks."""
    shared = twins.shared
    ranks: Any = shared.target.ranks
    stream = shared.stream(PROMPTS, GREEDY)
    next(stream)
    told: list[str] = []
    ranks.on_failure(told.append)
    os.kill(ranks.ranks.processes[0].popen.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=r"rank 1 of 2 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineLostError):
        shared.generate(PROMPTS, GREEDY)
    shared.close()
    assert time.monotonic() - began < 30 and told == ["rank 1 of 2 was killed by SIGKILL"]


def test_an_order_carries_what_only_the_device_knows() -> None:
    """Beside a GPU the tokens and ancestors of drafted trees are not on the host."""
    rows, mask = torch.arange(5), torch.tensor([[True, False], [True, True]])
    batch = Batch(
        rows,
        rows,
        rows + 8,
        (Span(0, 0, 3, 1), Span(1, 1, 2, 1, (-1,)), Span(2, 3, 4, 0, (-1, 0), ancestors=mask)),
        ((0,), (1,), (2,)),
        nodes=((2, torch.tensor([71])), (3, torch.tensor([72, 73]))),
    )
    order, numbers = BatchOrder.of(batch)
    assert numbers is not None and len(numbers) == sum(order.sizes) == 3 + 4
    again = pickle.loads(pickle.dumps(order)).whole(numbers)
    assert [(first, tokens.tolist()) for first, tokens in again.nodes] == [(2, [71]), (3, [72, 73])]
    first, second, third = (span.ancestors for span in again.spans)
    assert first is None and second is None and third is not None and torch.equal(third, mask)
    assert again.spans == batch.spans and torch.equal(again.slots, batch.slots)
    plain, nothing = BatchOrder.of(replace(batch, nodes=(), spans=batch.spans[:2]))
    assert nothing is None and sum(plain.sizes) == 0


# -- without a model ---------------------------------------------------------------------------

JOIN = (
    "import sys, json, time, torch; job = json.loads(sys.argv[1]); print('ready', "
    "flush=True); from paceline.parallel.group import RankGroup; "
    "RankGroup(1, 2, job['store'], torch.device('cpu')); time.sleep(300)"
)


@pytest.mark.slow  # it waits
def test_a_rank_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither dead nor alive: nobody's connection closes by itself."""
    monkeypatch.setattr(children, "_START", JOIN)
    monkeypatch.setattr(group, "_TIMEOUT", timedelta(seconds=30))
    ranks = processes.RankProcesses(2, torch.device("cpu"), {})
    try:
        with (
            pytest.raises(EngineLostError, match=r"rank 0 of 2 failed: .*[Tt]imed? ?out"),
            ranks.together(),
        ):
            ranks.group.least_memory()  # a collective operation, as those of a forward
    finally:
        ranks.close()
    assert not dist.is_initialized()


def test_a_rank_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_START", "print('failed: no memory'); raise SystemExit(1)")
    with pytest.raises(ModelLoadError, match="2 ranks were loading, rank 1 of 2 failed: no memory"):
        processes.RankProcesses(2, torch.device("cpu"), {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel": 0}, "it must be at least 1"),
        (
            {"tensor_parallel": 3},
            "4 attention heads over 2 KV heads, .*; use a number that divides both",
        ),
        ({"tensor_parallel": 2, "backend": "native"}, "backend='native' keeps a model in one"),
        ({"tensor_parallel": 2, "quantize": "int8"}, "quantize='int8' keeps a model in one"),
        ({"tensor_parallel": 2, "offload": "disk"}, "leave one of them out"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(
    random_pair: tuple[str, str], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(random_pair[0], "none", **options)


def test_doctor_says_what_ranks_cannot_share(random_pair: tuple[str, str]) -> None:
    assert examine(random_pair[0], tensor_parallel=2)
    with pytest.raises(ConfigError, match="which 3 ranks cannot share evenly"):
        examine(random_pair[0], tensor_parallel=3)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path / "gpt2")
    with pytest.raises(PacelineError, match="gpt2 has no tensor-parallel plan in transformers"):
        LLM(folder, draft="none", tensor_parallel=2)


@pytest.mark.slow  # a server is killed
def test_a_server_ends_with_its_ranks(tmp_path: Path) -> None:
    """Idle: nothing but the rank's own end says so."""
    target, draft = write_pair(tmp_path)
    options = ["--draft", draft, "--draft-length", "2", "--kv-cache-memory", "1M"]
    arguments = [target, *options, "--dtype", "float32", "--tensor-parallel", "2"]
    with ServedProcess(arguments) as server:
        answer = server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4})
        assert answer.status == 200, answer.read()
        (rank,) = ranks_below(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        assert server.wait(60) == 1
    last = server.errors[-1]
    assert "rank 1 of 2 was killed by SIGKILL" in last and "start it again" in last
    assert not any("Traceback" in line for line in server.errors)


def ranks_below(pid: int) -> list[int]:
    """Processes of ranks among the descendants of one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if b"paceline.parallel.shared" in command else ranks_below(child)
    return found

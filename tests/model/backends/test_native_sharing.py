"""What several engines, threads and programs share: tables, memory, processors, signals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.core.memory import processors
from paceline.kernels.library import choose, library
from paceline.model.backends.native.handle import RopeTables
from paceline.model.backends.native.recognise import Rotation


class Slow:
    """A rotary module that takes its time over tables."""

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time.sleep(0.05)
        return (torch.ones(1, positions.shape[1], 8),) * 2


def test_tables_are_there_for_whoever_comes_second() -> None:
    """Two engines over one model, on two threads: the first sets nothing before it has made it."""
    ropes, seen = RopeTables(Rotation(Slow()), 8), dict[int, int]()

    def reach(length: int) -> None:
        seen[length] = min((len(table) for table in ropes.covering(length).tables), default=0)

    threads = [threading.Thread(target=reach, args=(length,)) for length in (300, 200, 700, 50)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert all(seen[length] >= length for length in (300, 200, 700, 50)), seen


IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
INTERRUPTED = """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
"""
CHOOSES = """
import signal
from paceline.kernels.library import choose
{surroundings}
print(choose("amx"))
"""


@pytest.mark.parametrize("surroundings", [IGNORED, INTERRUPTED], ids=["ignored", "interrupted"])
def test_tiles_are_found_whatever_signals_come(surroundings: str) -> None:
    """The trial of tile instructions runs in a child; its answer does not hang on SIGCHLD, and a
    call that a signal interrupts is made again."""
    if not choose("amx"):
        pytest.skip("no tile instructions here")
    done = subprocess.run(
        [sys.executable, "-c", CHOOSES.format(surroundings=surroundings)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "True", done.stderr


# In a process of its own: the most memory that it ever held is asked for.
ATTENDS = """
import resource, sys, torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from paceline.core.batch import Batch, Span
from paceline.model.probe import register
from paceline.model.target import CausalModel

register()
context, rows = 32768, 96
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=context,
    attn_implementation="paceline",
)
torch.manual_seed(0)
model = CausalModel(LlamaForCausalLM(config).to(torch.bfloat16), "long")
assert model.use_backend("native")
cache = model.new_cache(context // 16, 16)
for part in cache.kv(0):
    part.normal_()
at = range(context - rows, context)
span = Span(0, 0, context - rows, rows)
batch = Batch([n % 64 for n in at], at, at, (span,), (tuple(range(context // 16)),))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with torch.inference_mode():
    before = peak()
    torch.set_num_threads(int(sys.argv[1]))
    many = model(batch, cache).logits
    most = peak() - before
    torch.set_num_threads(1)
    alone = model(batch, cache).logits
assert torch.equal(alone, many)
print(most)
"""


@pytest.mark.slow  # 96 rows behind 32,768 tokens
@pytest.mark.parametrize("threads", [16])
def test_scratch_does_not_grow_with_context_and_rows(threads: int) -> None:
    """Partial results of all blocks would take 104 MB of this small shape (1.1 GB of
    an 8B's at 32k); as many blocks at a time as 32 MB hold give the same bits."""
    done = subprocess.run(
        [sys.executable, "-c", ATTENDS, str(threads)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 << 20


QUOTA = """
import sys
from pathlib import Path
from paceline.core import memory
memory.CGROUPS = Path(sys.argv[1])
memory._SELF = memory.CGROUPS / "mine"
from paceline.kernels.library import library
print(library().pl_spins_before_yield(1) > 0, library().pl_spins_before_yield(2))
"""


def test_threads_beyond_a_quota_take_turns_at_barriers(tmp_path: Path) -> None:
    """Affinity shows all processors of the machine; `--cpus=1` gives the time of one."""
    (tmp_path / "mine").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    done = subprocess.run(
        [sys.executable, "-c", QUOTA, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "True 0", done.stderr


TAKEN = """
import os, sys
import torch
from paceline import LLM, SamplingParams
from paceline.kernels.library import library
torch.set_num_threads(2)
llm = LLM("paceline/tiny", draft="none", dtype="float32")
asked = SamplingParams(max_tokens=64, ignore_eos=True)
free = llm.generate("Once upon a time", asked)[0].token_ids
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of threads that begin from now on
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
taken = set()
for _ in range(200):
    assert llm.generate("Once upon a time", asked)[0].token_ids == free
    taken.add(library().pl_active_threads(2))
    if 1 in taken:
        break
print(sorted(taken))
"""


@pytest.mark.slow  # a process that decodes until a thread has left
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins threads")
def test_fewer_threads_where_processors_are_taken() -> None:
    """Two threads with one processor between them: the second waits outside, texts stay."""
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "1" in done.stdout


def test_many_threads_on_few_processors() -> None:
    """Who waits at a barrier lets the others run."""
    from paceline import LLM, SamplingParams

    asked = SamplingParams(max_tokens=12)  # hundreds of barriers each
    few, many = processors(), 16 * (os.cpu_count() or 1)
    assert library().pl_spins_before_yield(few) > 0 == library().pl_spins_before_yield(few + 1)
    llm = LLM("paceline/tiny", draft="none", dtype="float32")
    wanted = llm.generate("Once upon a time", asked)[0].token_ids
    before = torch.get_num_threads()
    torch.set_num_threads(many)
    try:
        assert llm.generate("Once upon a time", asked)[0].token_ids == wanted
    finally:
        torch.set_num_threads(before)

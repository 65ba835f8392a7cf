"""Other engines as contestants: real processes that speak their protocols, and what is told."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.lab.bench.contestants import Starter
from paceline.lab.bench.methods import parse_method
from paceline.lab.bench.outcome import Ask, TimedRun
from paceline.lab.bench.peers.kinds import EQUAL, PeerFailedError, PeerTools, shares
from paceline.llm import LLM
from paceline.server.local import local_service
from support import real_model
from support.planted_server import PlantedServer, served
from support.running_server import serve
from support.tiny_models import TinyPair

HERE = Path(__file__).parent
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (12, 13))
FAKE_GENAI = '''
"""Stands for the library: every token is the last one plus one; two in a step at the second."""

__version__ = "0"

class GenerationStatus:
    RUNNING, FINISHED = 0, 1

class SchedulerConfig: pass
class GenerationConfig: pass

class Output:
    def __init__(self, ids): self.generated_ids = ids

class Handle:
    def __init__(self, ids, config):
        self.left, self.last, self.fresh = config.max_new_tokens, ids[-1], []
    def can_read(self): return bool(self.fresh)
    def read(self):
        fresh, self.fresh = self.fresh, []
        return {0: Output(fresh)}
    def get_status(self): return GenerationStatus.RUNNING if self.left else 1

class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        if "broken" in str(folder): raise RuntimeError("Check failed\\nno model in the folder")
        self.handles, self.most = [], scheduler.max_num_seqs
    def add_request(self, number, ids, config):
        self.handles.append(Handle(ids.data[0], config))
        assert sum(h.left > 0 for h in self.handles) <= self.most
        return self.handles[-1]
    def step(self):
        for h in self.handles:
            for _ in range(min(h.left, 2 if h.left == 3 else 1)):
                h.last += 1; h.left -= 1; h.fresh.append(int(h.last))
'''
FAKE_OPENVINO = """
class Tensor:
    def __init__(self, data): self.data = data
class Core:
    def get_property(self, device, name): return "bf16"
"""


def asks(tokens: int = 4, **more: Any) -> list[Ask]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **more)
    return [Ask(prompt, params) for prompt in PROMPTS]


def counted(run: TimedRun, tokens: int = 4) -> list[list[int]]:
    """The ids of all answers, after what holds of every run was looked at."""
    assert run.tokens == tokens * len(run.answers)
    for answer in run.answers:
        times = [at for at, _ in answer.arrivals]
        assert times == sorted(times) and times[0] > 0 and times[-1] <= run.seconds
        assert sum(count for _, count in answer.arrivals) == answer.count
    return [list(answer.tokens) for answer in run.answers]


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> Iterator[LLM]:
    yield LLM(tiny_pair.target, draft="none", dtype="float32", max_batch_size=4)


def starter_of(llm: LLM, pair: TinyPair, **tools: str) -> Starter:
    found = Starter(llm, pair.target, PeerTools(**tools))
    found.longest = 64
    return found


@pytest.fixture
def fake_llama(tmp_path: Path) -> str:
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_llama_server.py"} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


# -- specs -----------------------------------------------------------------------------------------


def test_specs() -> None:
    for text, kind, where in (
        ("llamacpp:/models/m@2.gguf", "llamacpp", "/models/m@2.gguf"),
        ("openvino:folder", "openvino", "folder"),
        ("url:http://127.0.0.1:8080", "url", "http://127.0.0.1:8080"),
    ):
        method = parse_method(text, None)
        assert (method.name, method.variant, method.peer) == (text, kind, where)
        assert not method.speculates and not method.alone and not method.remembers
    for text in ("url:", "llamacpp", "openvino"):
        with pytest.raises(ConfigError, match="needs what it runs"):
            parse_method(text, None)


def test_tokens_are_dealt_out_whole() -> None:
    assert shares(7, [1, 1, 1]) == [2, 2, 3]
    assert shares(3, [2, 1, 0]) == [2, 1, 0] and sum(shares(11, [3, 5, 1, 1])) == 11


# -- any server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    """Our own server, over the same weights."""
    own = llm.beside(None, max_batch_size=4)
    for running in serve(local_service(own, "it")):
        yield running.url


@pytest.mark.parametrize("clients", [1, 3])
def test_a_server_writes_what_the_engine_writes(
    llm: LLM, tiny_pair: TinyPair, url: str, clients: int
) -> None:
    with starter_of(llm, tiny_pair) as starter:
        peer = starter.open(parse_method(f"url:{url}/v1", None), clients)
        found = counted(peer.run(asks()))
        wanted = llm.generate([list(p) for p in PROMPTS], asks()[0].params)
        texts = [llm.tokenizer.decode(ids) for ids in found]
        assert texts == [llm.tokenizer.decode(c.token_ids) for c in wanted]
        (words,) = starter.peers.differences().values()
    assert words["template"] == words["ids"] == words["ignore_eos"] == EQUAL
    assert words["precision"].startswith("unknown; here float32")


def test_what_a_server_does_not_know_is_told(llm: LLM, tiny_pair: TinyPair) -> None:
    """One that reads texts only, and counts otherwise."""
    with served(PlantedServer()) as address, starter_of(llm, tiny_pair) as starter:
        method = parse_method(f"url:{address}", None)
        run = starter.open(method, 1).run(asks())
        words = starter.peers.differences()[method.name]
    assert run.answers and words != dict.fromkeys(words, EQUAL)


@pytest.mark.parametrize(
    ("where", "words"),
    [("http://127.0.0.1:9", "answers at"), ("nowhere", "no URL"), ("http://x:y", "no URL")],
)
def test_nobody_there(llm: LLM, tiny_pair: TinyPair, where: str, words: str) -> None:
    with pytest.raises(PeerFailedError, match=words) as caught:
        starter_of(llm, tiny_pair).open(parse_method(f"url:{where}", None), 1)
    assert "\n" not in str(caught.value)


# -- llama.cpp -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2])
def test_llama_server_is_started_asked_and_ended(
    llm: LLM, tiny_pair: TinyPair, fake_llama: str, tmp_path: Path, clients: int
) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("a model")
    with starter_of(llm, tiny_pair, llama_server=fake_llama) as starter:
        peer: Any = starter.open(parse_method(f"llamacpp:{file}", None), clients)
        run = peer.run(asks())
        assert counted(run) == [[p[-1] + n for n in range(1, 5)] for p in PROMPTS]
        assert run.steps == 12
        child = peer.process
        assert not child.ended
        (words,) = starter.peers.differences().values()
    assert child.ended
    assert "99" in words["ids"] and "forbids the end token" in words["ignore_eos"]
    assert words["threads"] == words["cache"] == words["template"] == EQUAL


def test_early_ends_are_counted(
    llm: LLM, tiny_pair: TinyPair, fake_llama: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("ends early")
    with starter_of(llm, tiny_pair, llama_server=fake_llama) as starter:
        starter.open(parse_method(f"llamacpp:{file}", None), 1).run(asks())
        (words,) = starter.peers.differences().values()
    assert words["ignore_eos"] == "3 of 3 answers ended early"


def test_llama_servers_that_do_not_start(
    llm: LLM,
    tiny_pair: TinyPair,
    fake_llama: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PACELINE_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    file = tmp_path / "model.gguf"
    file.write_text("dies")
    method = parse_method(f"llamacpp:{file}", None)

    def refused(**tools: str) -> str:
        with pytest.raises(PeerFailedError) as caught:
            starter_of(llm, tiny_pair, **tools).open(method, 1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no llama-server on the PATH" in refused()
    assert "is no program" in refused(llama_server="/no/such")
    assert "unknown model architecture" in refused(llama_server=fake_llama)
    file.unlink()
    assert "there is no file" in refused(llama_server=fake_llama)


def real_llama() -> str | None:
    return shutil.which(os.environ.get("PACELINE_LLAMA_SERVER") or "llama-server")


@pytest.mark.skipif(real_llama() is None, reason="no llama-server: set PACELINE_LLAMA_SERVER")
def test_a_real_llama_server() -> None:
    source = os.environ.get("PACELINE_TEST_GGUF")
    if source is None:
        pytest.skip("no GGUF file of the real model: set PACELINE_TEST_GGUF")
    model = real_model.require()
    llm = LLM(model, draft="none", max_batch_size=1, kv_cache_memory=64 << 20)
    starter = Starter(llm, model, PeerTools(llama_server=real_llama()))
    starter.longest = 128
    with starter:
        ids = tuple(llm.render_chat([{"role": "user", "content": "What do bees make?"}]))
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        run = starter.open(parse_method(f"llamacpp:{source}", None), 1).run([Ask(ids, params)])
    assert run.tokens == 8
    plain = llm.generate([list(ids)], params)[0].token_ids
    assert list(run.answers[0].tokens)[:3] == plain[:3]


# -- OpenVINO --------------------------------------------------------------------------------------


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """A Python whose openvino-genai is the stand-in."""
    room = tmp_path / "packages"
    room.mkdir()
    (room / "openvino_genai.py").write_text(FAKE_GENAI)
    (room / "openvino.py").write_text(FAKE_OPENVINO)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={room} exec {sys.executable} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.mark.parametrize("clients", [1, 2])
def test_openvino_runs_in_its_own_python(
    llm: LLM, tiny_pair: TinyPair, fake_python: str, tmp_path: Path, clients: int
) -> None:
    with starter_of(llm, tiny_pair, openvino_python=fake_python) as starter:
        peer: Any = starter.open(parse_method(f"openvino:{tmp_path}", None), clients)
        run = peer.run(asks())
        assert counted(run) == [[p[-1] + n for n in range(1, 5)] for p in PROMPTS]
        assert run.steps == 9, "two tokens came together once in each answer"
        child = peer.process
        (words,) = starter.peers.differences().values()
    assert child.ended and "cache bf16" in words["precision"]


def test_openvino_that_is_not_there(
    llm: LLM, tiny_pair: TinyPair, fake_python: str, tmp_path: Path
) -> None:
    def refused(folder: Path, python: str) -> str:
        with pytest.raises(PeerFailedError) as caught:
            starter_of(llm, tiny_pair, openvino_python=python).open(
                parse_method(f"openvino:{folder}", None), 1
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    assert "pip install openvino-genai" in refused(tmp_path, str(bare))
    assert "is no program" in refused(tmp_path, "/no/such")
    assert "there is no folder" in refused(tmp_path / "none", fake_python)
    (tmp_path / "broken").mkdir()
    assert "no model in the folder" in refused(tmp_path / "broken", fake_python)

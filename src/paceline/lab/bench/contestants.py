"""Contestants: our engine with any drafter, and transformers' ways of decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from paceline.core.sequence import SequenceState
from paceline.engine.driver import Drive, StepSums, sequence
from paceline.errors import ConfigError
from paceline.lab.bench.methods import Method
from paceline.lab.bench.outcome import Ask, Contestant, TimedAnswer, TimedRun
from paceline.lab.bench.peers.kinds import LLAMACPP, OPENVINO, OwnSide, PeerDifferences, PeerTools
from paceline.lab.bench.peers.llamacpp import open_llamacpp
from paceline.lab.bench.peers.openvino import OpenVino, open_openvino
from paceline.lab.bench.peers.served import ServedPeer
from paceline.lab.bench.peers.url import open_url
from paceline.llm import LLM
from paceline.model.held import held_matrices
from paceline.model.loading import load_module


class Paceline(Contestant):
    """Our engine, driven by ``clients`` that each send their next request when one is answered.

    It takes the engine's steps itself, token ids in and out, so that it can tell steps that read
    prompts from those that only decode. ``build`` gives the LLM; a drafter that learns from
    earlier requests is built anew at every ``refresh``.
    """

    def __init__(self, method: Method, build: Callable[[], LLM], clients: int) -> None:
        self.name = method.name
        self.llm = build()
        self._build = build if method.remembers else None
        self._clients = clients

    def refresh(self) -> None:
        if self._build is not None:
            self.llm = self._build()

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PacelineError if a request fails or does not fit into the cache."""
        drive = Drive(self.llm.engine, [self._request(ask) for ask in asks], self._clients).run()
        decoding = StepSums.of(step for step in drive.steps if step.decodes)
        counts = drive.counts
        return TimedRun(
            answers=[_answer(seq) for seq in drive.seqs],
            seconds=drive.seconds,
            steps=counts.target_steps,
            drafted=counts.drafted,
            levels=counts.levels,
            accepted=counts.accepted,
            reached=counts.reached_at,
            accepted_at=counts.accepted_at,
            phases=decoding.seconds,
            decoding_steps=decoding.steps,
            decoding_slots=decoding.sequences,
        )

    def _request(self, ask: Ask) -> SequenceState:
        stops = frozenset(ask.params.stop_token_ids)
        if not ask.params.ignore_eos:
            stops |= self.llm.end_tokens
        return sequence(ask.prompt, ask.params, stops)


def _answer(seq: SequenceState) -> TimedAnswer:
    arrivals = tuple((moment - seq.queued, count) for moment, count in seq.arrivals)
    return TimedAnswer(tuple(seq.tokens[seq.prompt_length :]), arrivals)


class Transformers(Contestant):
    """transformers' ``generate``, one request at a time.

    ``extra`` are the arguments of a speculative method. A delivery to its streamer counts as one
    target step.
    """

    def __init__(
        self, name: str, module: Any, end: frozenset[int], extra: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self._module, self._end, self._extra = module, sorted(end), extra or {}

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """``seconds`` is from the first request to the end of the last."""
        start = time.perf_counter()
        answers = [self._answer(ask) for ask in asks]
        return TimedRun.told(answers, time.perf_counter() - start)

    @torch.inference_mode()
    def _answer(self, ask: Ask) -> TimedAnswer:
        params, config = ask.params, self._module.generation_config
        # In the config and not by min_new_tokens: that would forbid the token and change the text.
        config.eos_token_id = None if params.ignore_eos else self._end
        config.pad_token_id = 0
        if params.seed is not None:
            torch.manual_seed(params.seed)
        sampling: dict[str, Any] = {"do_sample": not params.greedy}
        if not params.greedy:
            sampling |= {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([ask.prompt], device=self._module.device)
        arrivals = _Arrivals()
        out = self._module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            use_cache=True,
            streamer=arrivals,
            **sampling,
            **self._extra,
        )
        return TimedAnswer(tuple(out[0, ids.shape[1] :].tolist()), tuple(arrivals.found))


class _Arrivals:
    """A streamer for ``generate`` that notes when tokens come; the first delivery is the prompt."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []
        self._start = time.perf_counter()
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self.found.append((time.perf_counter() - self._start, tokens.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class Starter:
    """Makes contestants around one loaded target; modules of transformers are loaded once.

    ``options`` go to ``LLM.beside``. Prompts are computed anew in every round, by all.
    """

    def __init__(
        self, llm: LLM, model: str, tools: PeerTools | None = None, **options: Any
    ) -> None:
        self._llm, self._model = llm, model
        self.peers = Peers(tools or PeerTools())
        self.longest = llm.max_model_len  # most tokens of a request: other engines make room
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        self._modules: dict[str, Any] = {}

    def open(self, method: Method, clients: int) -> Contestant:
        """Raises what loading a drafter or a module or starting another engine raises."""
        if method.peer is not None:
            return self.peers.open(method, clients, self._own_side())
        if method.variant is not None:
            assert clients == 1, "transformers answers one request at a time"
            return self._open_theirs(method)
        length = method.length if method.draft is not None else 0
        assert length is not None, "ours always have one"

        def build() -> LLM:
            return self._llm.beside(
                method.draft, draft_length=length, max_batch_size=clients, **self._options
            )

        return Paceline(method, build, clients)

    def _own_side(self) -> OwnSide:
        llm = self._llm
        formats = [held.format for held in held_matrices(llm.target.hf)]
        named = [name for name, _ in Counter(formats).most_common()]
        dtype = str(llm.target.dtype).removeprefix("torch.")
        threads, size = torch.get_num_threads(), llm.target.vocab_size
        words = f"{', '.join(named)}, cache {dtype}"
        return OwnSide(llm.tokenizer, size, threads, words, self.longest)

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        self.peers.close()

    def _open_theirs(self, method: Method) -> Transformers:
        module, end = self._module(self._model), self._llm.end_tokens
        extra: dict[str, Any] = {}
        if method.variant == "lookup":
            extra["prompt_lookup_num_tokens"] = method.length or 10
        elif method.variant == "assisted":
            assert method.draft is not None
            assistant = self._module(method.draft)
            if assistant.config.vocab_size != module.config.vocab_size:
                raise ConfigError(
                    f"{method.name}: {method.draft} has another vocabulary than {self._model}; "
                    "name a draft with the target's, or leave this method out"
                )
            if method.length is not None:  # generate reads them from the assistant
                config = assistant.generation_config
                config.num_assistant_tokens = method.length
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            extra["assistant_model"] = assistant
        return Transformers(method.name, module, end, extra)

    def _module(self, name: str) -> Any:
        """With scaled-dot-product attention, in the target's dtype, on its device."""
        if name not in self._modules:
            target = self._llm.target
            self._modules[name] = load_module(name, target.dtype, target.device, "sdpa").eval()
        return self._modules[name]


class Peers:
    """The other engines of a run. Those of one number of clients live at the same time, as every
    one takes memory and, while it waits, next to no processor."""

    def __init__(self, tools: PeerTools) -> None:
        self._tools = tools
        self._open = ExitStack()
        self._clients = 0
        self._differences: dict[str, PeerDifferences] = {}

    def open(self, method: Method, clients: int, own: OwnSide) -> Contestant:
        """Raises PeerFailedError."""
        if clients != self._clients:
            self.close()
            self._clients = clients
        peer = self._started(method, clients, own)
        self._open.callback(peer.close)
        # What was seen of it at other numbers of clients still counts.
        peer.differences = self._differences.setdefault(method.name, peer.differences)
        return peer

    def _started(self, method: Method, clients: int, own: OwnSide) -> ServedPeer | OpenVino:
        assert method.peer is not None
        name, where, tools = method.name, method.peer, self._tools
        if method.variant == LLAMACPP:
            return open_llamacpp(name, where, clients, own, tools.llama_server)
        if method.variant == OPENVINO:
            return open_openvino(name, where, clients, own, tools.openvino_python)
        return open_url(name, where, clients, own)

    def differences(self) -> dict[str, dict[str, str]]:
        """By method: what could not be made equal, in words."""
        return {name: found.record() for name, found in self._differences.items()}

    def close(self) -> None:
        """End those that were started here."""
        self._open.close()

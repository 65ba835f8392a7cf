"""What answers the requests: our engine with any drafter, transformers' ways of decoding, and
servers of other engines (served.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.engine.driver import Drive, StepSums, sequence
from paceline.errors import ConfigError
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runs import Ask, BenchEngine, TimedAnswer, TimedRun
from paceline.lab.bench.served import open_served
from paceline.llm import LLM
from paceline.model.loading import load_module


class Paceline(BenchEngine):
    """Our engine, driven by ``clients`` that each send their next request when one is answered.

    It takes the engine's steps itself, token ids in and out, so that it can tell steps that read
    prompts from those that only decode. ``build`` gives the LLM; a drafter that learns from
    earlier requests is built anew at every ``refresh``.
    """

    def __init__(self, method: Method, build: Callable[[], LLM], clients: int) -> None:
        self.name, self.method = method.name, method
        self.llm = build()
        self._build = build if method.remembers else None
        self._clients = clients

    def refresh(self) -> None:
        if self._build is not None:
            self.llm = self._build()

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PacelineError if a request fails or does not fit into the cache."""
        seqs = []
        for ask in asks:
            ends = frozenset[int]() if ask.params.ignore_eos else self.llm.end_tokens
            seqs.append(sequence(ask.prompt, ask.params, ends | {*ask.params.stop_token_ids}))
        drive = Drive(self.llm.engine, seqs, self._clients).run()
        counts = drive.counts
        return TimedRun(
            answers=[
                TimedAnswer(
                    tuple(seq.tokens[seq.prompt_length :]),
                    tuple((moment - seq.queued, count) for moment, count in seq.arrivals),
                )
                for seq in drive.seqs
            ],
            seconds=drive.seconds,
            steps=counts.target_steps,
            drafted=counts.drafted,
            levels=counts.levels,
            accepted=counts.accepted,
            reached=counts.reached_at,
            accepted_at=counts.accepted_at,
            decoding=StepSums.of(step for step in drive.steps if step.decodes),
        )


class Transformers(BenchEngine):
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
        return TimedRun.of_deliveries(answers, time.perf_counter() - start)

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
        return TimedAnswer(tuple(out[0, ids.shape[1] :].tolist()), tuple(arrivals.seen))


class _Arrivals:
    """A streamer for ``generate`` that notes when tokens come; the first delivery is the prompt."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        self._start = time.perf_counter()
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self.seen.append((time.perf_counter() - self._start, tokens.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class Starter:
    """Makes engines around one loaded target; modules of transformers are loaded once.

    ``options`` go to ``LLM.beside``. Prompts are computed anew in every round, by all.
    """

    def __init__(self, llm: LLM, model: str, **options: Any) -> None:
        self._llm, self._model = llm, model
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        self._modules: dict[str, Any] = {}
        self.unequal: dict[str, dict[str, str]] = {}  # of other engines, see served.py

    def open(self, method: Method, clients: int) -> BenchEngine:
        """Raises what loading a drafter or a module or asking another engine raises."""
        if method.url is not None:
            served = open_served(method.name, method.url, clients, self._llm)
            # What was seen of it at other numbers of clients still counts.
            served.different = self.unequal.setdefault(method.name, served.different)
            return served
        if method.variant is not None:
            assert clients == 1, "transformers answers one request at a time"
            return self._open_transformers(method)
        length = method.length if method.draft is not None else 0
        assert length is not None, "ours always have one"

        def build() -> LLM:
            return self._llm.beside(
                method.draft, draft_length=length, max_batch_size=clients, **self._options
            )

        return Paceline(method, build, clients)

    def _open_transformers(self, method: Method) -> Transformers:
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

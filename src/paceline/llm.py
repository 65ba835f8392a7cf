"""``LLM``: loads a model and a drafter, builds the engine, and runs requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.build import EngineOptions, build_engine, load_draft, load_target, seeded_generator
from paceline.control.controller import Controller
from paceline.core.costs import TargetCosts
from paceline.core.keywords import forgiving
from paceline.core.params import SamplingParams
from paceline.core.sequence import SEQUENCE_IDS, SequenceState
from paceline.core.stages import stage
from paceline.draft.base import vocabulary_of
from paceline.draft.foreign import foreign_of
from paceline.drafters import BLOCK_SIZE, DraftLike, parse_draft
from paceline.errors import ConfigError, PromptError
from paceline.model.backends.base import Ranks
from paceline.model.loading import load_tokenizer
from paceline.model.lora import Adapters
from paceline.model.names import DEFAULT_DRAFT, as_name
from paceline.model.tokenizer import Tokenizer
from paceline.request.completion import Completion, StreamEvent
from paceline.request.grammar import GrammarCompiler
from paceline.request.options import SamplingDefaults, sampling_defaults
from paceline.request.owner import EngineOwner
from paceline.request.progress import bars
from paceline.request.receipt import Receipts
from paceline.request.request import Request, any_ended, any_events, completions_of
from paceline.request.validation import (
    ContextBudget,
    Conversations,
    Params,
    as_conversations,
    as_params,
    as_prompts,
    check_params,
    encode,
    endings,
    params_of_sample,
)
from paceline.request.validation import Message as Message
from paceline.request.validation import Prompt as Prompt
from paceline.request.validation import render_chat as rendered
from paceline.settings import explicit
from paceline.settings.tuned import TunedSettings

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class LLM:
    """A target model, the drafters for it, and the engine that decodes with them.

    ``model``: a built-in name (``paceline/tiny``), a local folder, or the hub name of a
    ``transformers`` causal LM. ``draft`` is one of: "auto" (every drafter that can pay: lookups,
    what was trained for the model and is on this machine, its 4-bit copy; see ``drafts`` and
    ``setup_notes``); None or "none" (plain decoding); a draft model; a spec ("ngram",
    "tree:PATH,branching=2x2x1") or its record from ``paceline.drafters`` (``Eagle3(path,
    nodes=16)``); an object with the Protocol ``Drafter``, which then belongs to this LLM; a list of
    these, from which requests choose by a name in ``drafters`` (``SamplingParams.drafter``), by
    default the first; or vLLM's speculative_config.

    ``dtype`` and ``device`` "auto" take bf16 and CUDA if the machine has them. ``backend`` "auto"
    is "native" (our kernels, in which a row has the same bits in any batch) for models it supports,
    else "reference" (torch). ``quantize`` "int8" or "int4" rounds the weights (on a CPU), "none"
    dequantises a quantised file. ``tensor_parallel`` processes share the target's weights.
    ``offload`` "cpu" or "disk" keeps the layers there that do not fit into ``weights_memory`` bytes
    of the device. ``draft_quantize``, ``draft_offload`` and ``draft_device`` do the same for draft
    models. ``kv_cache_memory``: bytes for the KV cache; ``kv_cache_dtype`` "int8" stores the
    target's keys and values in 8 bits; ``prefix_sharing`` lets equal prefixes share cache blocks.

    ``max_model_len``: most tokens of a sequence, prompt and answer. ``max_batch_size`` (8):
    sequences decoded together. ``draft_length``: levels of a draft, or "auto". ``rule``: acceptance
    rule for sampled drafts. ``drafting``: "throughput" maximises the tokens per second of all
    requests together, "fair" slows no request down for another. ``log_decisions`` logs who drafts
    and why; ``controller`` replaces the adaptive one (docs/concepts/control.md). ``strict`` raises
    the errors of a drafter, which otherwise cost only its drafts (docs/drafters/your_own.md).
    ``seed``: for requests without one. Requests without parameters sample by
    ``default_temperature``, ``default_top_p``, ``default_top_k``, ``default_min_p`` and
    ``default_repetition_penalty``, else by the checkpoint's ``generation_config`` ("none" ignores
    it); see ``default_params``.

    ``config``: the file of tuned settings that ``paceline tune`` writes. It sets
    ``max_batch_size``, the draft (if that is "auto") and, with that draft, its length.
    Other arguments override it. ``lora``: folders of LoRA adapters by
    name (``adapters.load`` loads more).

    Raises ModelLoadError, UnsupportedModelError, VocabularyMismatchError, CacheMemoryError or
    ConfigError, in one line. Keywords of other engines are translated, or refused with advice
    (core/keywords.py). ``with LLM(...) as llm`` closes it. Threads share its steps; see AsyncLLM.
    """

    sampling_defaults: SamplingDefaults
    setup_notes: tuple[str, ...] = ()  # for the user
    target_costs: TargetCosts | None = None  # for ``with_draft``; None: measured
    _ranks: Ranks | None = None  # set in the LLM that loaded the target, which ends them

    @forgiving("LLM")
    def __init__(
        self,
        model: str | Path,
        draft: DraftLike | Sequence[DraftLike] | Mapping[str, Any] | None = DEFAULT_DRAFT,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_batch_size: int | None = None,
        kv_cache_memory: int | str | None = None,
        draft_length: int | str | None = None,
        rule: str | None = None,
        prefix_sharing: bool = True,
        seed: int | None = None,
        config: str | Path | None = None,
        backend: str = "auto",
        quantize: str | None = None,
        draft_quantize: str | None = None,
        tensor_parallel: int = 1,
        offload: str | None = None,
        weights_memory: int | str | None = None,
        draft_offload: str | None = None,
        draft_device: str | None = None,
        kv_cache_dtype: str = "auto",
        drafting: str = "fair",
        log_decisions: bool = False,
        strict: bool = False,
        controller: Controller | None = None,
        generation_config: str = "auto",
        default_temperature: float | None = None,
        default_top_p: float | None = None,
        default_top_k: int | None = None,
        default_min_p: float | None = None,
        default_repetition_penalty: float | None = None,
        lora: Mapping[str, str | Path] | None = None,
    ) -> None:
        self._open(model, draft, config, controller, explicit(locals(), "LLM"), lora)

    def _open(
        self,
        model: str | Path,
        draft: DraftLike | Sequence[DraftLike] | Mapping[str, Any] | None,
        config: str | Path | None,
        controller: Controller | None,
        given: dict[str, Any],
        lora: Mapping[str, str | Path] | None,
    ) -> None:
        """Load what the constructor's arguments name; ``given`` are explicit engine settings."""
        model = as_name(model)
        if not isinstance(config, str | Path | None):
            raise ConfigError(f"config is {config!r}; it must be the path of tuned settings")
        if (foreign := foreign_of(draft)) is not None:
            draft, theirs = foreign.spec, {"draft_length": foreign.length, "rule": foreign.rule}
            given = explicit(theirs, "LLM") | given
        assert not isinstance(draft, Mapping)  # a mapping is foreign
        tuned = None if config is None else TunedSettings.read(config)
        follows = tuned is not None and draft in (DEFAULT_DRAFT, (DEFAULT_DRAFT,), tuned.draft.spec)
        settings = tuned.settings(follows) if tuned else {}
        options = EngineOptions(**settings | given, controller=controller)
        for spec in draft if isinstance(draft, (list, tuple)) else (draft,):
            if isinstance(spec, str):
                parse_draft(spec)  # misspelt specs raise before anything is loaded
        with stage(f"loading {model}"):
            target = load_target(model, options)
        self._ranks, notes = target.ranks, [target.load_note]
        if tuned is not None and config is not None:
            tuned.check_model(target, config)
            if follows:
                draft = tuned.draft.spec
        self.setup_notes = tuple(filter(None, notes))
        generation = getattr(target.hf, "generation_config", None)
        self.sampling_defaults = sampling_defaults(vars(options), generation, model)
        self.adapters = Adapters(target, lora)
        self.target, self.tokenizer = target, load_tokenizer(model)
        self._assemble(draft, options)
        self._grammars = GrammarCompiler(self.tokenizer, self._width, self.end_tokens)

    def with_draft(
        self,
        draft: DraftLike | Sequence[DraftLike] | None = None,
        *,
        max_model_len: int | None = None,
        kv_cache_memory: int | str | None = None,
        draft_length: int | str | None = None,
        rule: str | None = None,
        max_batch_size: int | None = None,
        prefix_sharing: bool = True,
        seed: int | None = None,
        draft_quantize: str | None = None,
        draft_offload: str | None = None,
        draft_device: str | None = None,
        drafting: str = "fair",
        log_decisions: bool = False,
        strict: bool = False,
        controller: Controller | None = None,
    ) -> LLM:
        """Another LLM over the same weights, with its own drafter, cache and settings, to compare
        settings without loading a model twice. Arguments and errors are those of the
        constructor."""
        given = explicit(locals(), "with_draft")
        given |= {"controller": controller, "costs": self.target_costs}
        options = EngineOptions(dtype=self._dtype, **given)
        other = LLM.__new__(LLM)
        other.target, other.tokenizer = self.target, self.tokenizer
        other.sampling_defaults, other.adapters = self.sampling_defaults, self.adapters
        other._grammars = self._grammars  # making its table of tokens takes long
        other._assemble(draft, options)
        return other

    def _assemble(
        self, draft: DraftLike | Sequence[DraftLike] | None, options: EngineOptions
    ) -> None:
        """Load the drafter and build the engine around the target."""
        target, tokenizer, self._dtype = self.target, self.tokenizer, options.dtype
        self.receipts = Receipts(target, tokenizer)
        generator = seeded_generator(target.device, options.seed)
        with stage("loading the draft"):
            prepared = load_draft(draft, target, tokenizer, options)
        self.drafters, self.drafts = prepared.names, prepared.drafts
        self.setup_notes += prepared.notes
        with stage("measuring what steps cost"):
            engine = build_engine(target, prepared, options, generator)
        ranks = self._ranks
        self.owner = EngineOwner(engine) if ranks is None else EngineOwner(engine, ranks.close)
        cached = engine.cache.num_blocks * BLOCK_SIZE
        self.context_budget = ContextBudget(target.name, options.positions(target), cached)
        eos = tokenizer.eos_token_id
        self.end_tokens = target.eos_token_ids | ({eos} if isinstance(eos, int) else set())
        self._width = max(len(tokenizer), 1)
        self._encoding = threading.Lock()  # the tokenizer is not thread-safe

    @property
    def engine(self) -> Engine:
        """Raises PacelineError after ``close``."""
        return self.owner.engine

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of requests that have none: ``default_temperature`` and so on, else those
        of the checkpoint's generation config, else greedy."""
        return SamplingParams(**self.sampling_defaults.filled())

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together; longer answers end with "length"."""
        return self.context_budget.limit

    # -- public ------------------------------------------------------------------------------

    @forgiving("LLM.generate")
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = False
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids) in one continuous batch.

        Returns ``n`` completions for each prompt, in the order of the prompts. ``params``: for all
        prompts, or a list with one per prompt; ``default_params`` if left out. ``progress``
        shows a bar.
        A request that fails ends alone, with ``finish_reason`` "error". Raises PromptError or
        ConfigError before anything is decoded, PacelineError after ``close``, EngineLostError if
        the model can no longer run."""
        requests = self.prepare_all(prompts, params, False)
        with bars(progress), stage("decoding", len(requests), "answers") as shown:
            try:
                self.owner.enqueue(requests)
                running = requests
                while running:
                    self.owner.until(partial(any_ended, running))
                    before = len(running)
                    running = [request for request in running if request.completion is None]
                    shown.advance(before - len(running))
            finally:
                self.owner.release(requests)
        return completions_of(requests)

    @forgiving("LLM.stream")
    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> Iterator[StreamEvent]:
        """Like ``generate``, but yields what each step adds. Errors in the arguments are raised by
        this call; decoding starts when the first event is requested. Closing or dropping the
        iterator cancels unfinished requests. Several streams may be read in turn."""
        return self._events(self.prepare_all(prompts, params, True))

    @forgiving("LLM.chat")
    def chat(
        self, messages: Conversations, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer one conversation, ``[{"role": "user", "content": ...}]``, or a list of them."""
        prompts: list[Prompt] = [self.render_chat(item) for item in as_conversations(messages)]
        return self.generate(prompts, params)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation by the model's chat template to token ids. Raises PromptError."""
        with self._encoding:
            return rendered(self.tokenizer, self.target.name, messages)

    @property
    def draft_vocabulary(self) -> str | None:
        """How a draft with another vocabulary is used, such as "token-level intersection, 31,407
        of 49,152 tokens"; None if there is none."""
        return vocabulary_of(self.engine.drafter)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of transformers; vLLM's name for the attribute ``tokenizer``."""
        return self.tokenizer

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests and drop the engine; callers get a PacelineError. Idempotent."""
        self.owner.close()

    # -- requests ----------------------------------------------------------------------------

    def prepare_all(
        self, prompts: Prompt | Sequence[Prompt], params: Params, streams: bool
    ) -> list[Request]:
        """Make the requests of all prompts, or none if one is refused. See ``prepare``."""
        listed, given = as_prompts(prompts), self.default_params if params is None else params
        pairs = zip(listed, as_params(given, len(listed)), strict=True)
        requests = []
        for number, (prompt, prompt_params) in enumerate(pairs):
            try:
                requests += self.prepare(prompt, prompt_params, number, streams)
            except PromptError as error:
                raise PromptError(f"prompts[{number}]: {error}" if listed[1:] else error) from None
        return requests

    def prepare(
        self, prompt: Prompt, params: SamplingParams, number: int = 0, streams: bool = True
    ) -> list[Request]:
        """Make the ``n`` requests of a prompt, checked and ready for the owner. Does not touch the
        engine, so it may run concurrently with steps. Raises PromptError or ConfigError, and
        PacelineError after ``close``."""
        _ = self.engine
        params, origin = self.receipts.begin(params)
        width = min(self._width, self.target.vocab_size)
        grammar, adapter = params.grammar, self.adapters.named(params.lora)
        requests = []
        with self._encoding:
            tokens = encode(self.tokenizer, prompt, width, self.context_budget)
        check_params(params, self._width, width, self.drafters)
        stops, hidden = endings(params, self.end_tokens)
        for index in range(params.n):
            sample = list(tokens), len(tokens), params_of_sample(params, index)
            seq = SequenceState(next(SEQUENCE_IDS), *sample, stops, adapter=adapter)
            seq.constraint = None if grammar is None else self._grammars.matcher(grammar)
            rest = self.tokenizer, streams, hidden, origin
            requests.append(Request(seq, prompt, number, index, *rest))
        return requests

    def _events(self, requests: list[Request]) -> Iterator[StreamEvent]:
        try:
            self.owner.enqueue(requests)
            while any(request.completion is None or request.events for request in requests):
                self.owner.until(partial(any_events, requests))
                for request in requests:
                    while request.events:
                        yield request.events.popleft()
        finally:
            self.owner.release(requests)

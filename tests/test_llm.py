"""The public API: parameters, streams, statistics, errors, and requests that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.core.batch import Plan
from paceline.core.tree import TokenTree
from paceline.errors import (
    CacheMemoryError,
    ConfigError,
    ModelLoadError,
    PacelineError,
    PromptError,
)
from support.cache_invariants import check_cache

PROMPT = "Once upon a time there was a little"
FREE = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_pair: tuple[str, str]) -> Iterator[LLM]:
    engine = LLM(random_pair[0], random_pair[1], dtype="float32", draft_length=3, max_batch_size=4)
    yield engine
    assert not engine.engine.has_work
    assert engine.engine.cache.pool.available == engine.engine.cache.num_blocks


def test_stream_joins_to_the_completion(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, ignore_eos=True)
    whole = llm.generate([PROMPT, "def add(a, b)"], params)
    texts = {0: "", 1: ""}
    ids: dict[int, list[int]] = {0: [], 1: []}
    drafted: dict[int, list[bool]] = {0: [], 1: []}
    final = {}
    for event in llm.stream([PROMPT, "def add(a, b)"], params):
        texts[event.request] += event.text
        ids[event.request] += event.token_ids
        drafted[event.request] += event.from_draft
        if event.completion:
            final[event.request] = event.completion
    for place, completion in enumerate(whole):
        assert ids[place] == completion.token_ids == final[place].token_ids
        assert texts[place] == completion.text == final[place].text
        assert drafted[place] == completion.draft_mask


def test_without_a_draft_nothing_was_accepted_or_refused(llm: LLM) -> None:
    plain = llm.with_draft(None)
    (completion,) = plain.generate(PROMPT, FREE)
    assert completion.stats.drafted_tokens == 0
    assert completion.stats.acceptance_rate is None


def test_statistics_add_up(llm: LLM) -> None:
    (completion,) = llm.generate(PROMPT, FREE)
    stats = completion.stats
    assert len(completion.token_ids) == len(completion.draft_mask) == 20
    assert sum(completion.draft_mask) == stats.accepted_tokens > 0
    assert stats.accepted_tokens + stats.target_steps == 20
    assert stats.mean_accepted_length == pytest.approx(20 / stats.target_steps)
    assert stats.acceptance_rate == pytest.approx(stats.accepted_tokens / stats.drafted_tokens)
    assert all(0 <= rate <= 1 for rate in stats.acceptance_per_position)
    assert stats.tokens_per_second == pytest.approx(20 / stats.decode_seconds)


def test_acceptance_per_position_is_conditional(random_pair: tuple[str, str]) -> None:
    """The target as its own draft: every position that is reached is accepted."""
    own = LLM(random_pair[0], random_pair[0], dtype="float32", draft_length=4)
    (completion,) = own.generate(PROMPT, FREE)
    assert completion.stats.acceptance_per_position == [1.0] * 4
    assert completion.stats.target_steps == 4  # 5 tokens a step


def test_n_completions_differ_and_are_numbered(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=9, n=3)
    many = llm.generate(PROMPT, params)
    assert [completion.index for completion in many] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in many}) == 3
    (first,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=9))
    assert many[0].token_ids == first.token_ids


def test_stop_string_and_stop_token(llm: LLM) -> None:
    (free,) = llm.generate(PROMPT, FREE)
    stop = free.text[5:8]
    (stopped,) = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    token = free.token_ids[6]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(token,))
    for special in (True, False):
        (cut,) = llm.generate(PROMPT, replace(params, skip_special_tokens=special))
        kept = free.token_ids[: free.token_ids.index(token)]
        assert cut.token_ids == [*kept, token]
        assert cut.finish_reason == "stop"
        assert cut.text == llm.generate(PROMPT, replace(FREE, max_tokens=len(kept)))[0].text
        shown = replace(params, skip_special_tokens=special, include_stop_str_in_output=True)
        ended = replace(FREE, max_tokens=len(kept) + 1)
        assert llm.generate(PROMPT, shown)[0].text == llm.generate(PROMPT, ended)[0].text


@pytest.mark.parametrize("skip", [True, False])
def test_an_included_end_token_is_shown_if_special_tokens_are(llm: LLM, skip: bool) -> None:
    """As in vLLM: the token that ends the text counts as its last one."""
    end = llm.tokenizer.eos_token_id
    ended = SamplingParams(logit_bias={end: 100}, include_stop_str_in_output=True)
    (cut,) = llm.generate(PROMPT, replace(ended, skip_special_tokens=skip))
    assert cut.token_ids == [end]
    assert cut.text == ("" if skip else llm.tokenizer.decode([end]))


def test_min_tokens_hold_a_stop_token_off(llm: LLM) -> None:
    (free,) = llm.generate(PROMPT, FREE)
    token = free.token_ids[2]
    params = SamplingParams(max_tokens=20, min_tokens=10, ignore_eos=True, stop_token_ids=(token,))
    (held,) = llm.generate(PROMPT, params)
    assert token not in held.token_ids[:10]
    assert len(held.token_ids) >= 10


def test_max_tokens_and_context_end_with_length(llm: LLM) -> None:
    (one,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(one.token_ids) == 1 and one.finish_reason == "length"
    limit = llm.target.max_positions
    prompt = [7] * (limit - 3)
    (full,) = llm.generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(full.token_ids) == 3 and full.finish_reason == "length"


def test_logprobs_do_not_depend_on_speculation(llm: LLM, random_pair: tuple[str, str]) -> None:
    plain = LLM(random_pair[0], draft="none", dtype="float32")
    params = SamplingParams(
        max_tokens=16, temperature=0.8, seed=2, logprobs=3, frequency_penalty=0.5, ignore_eos=True
    )
    (a,), (b,) = plain.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert a.token_ids == b.token_ids and a.logprobs is not None and b.logprobs is not None
    assert len(a.logprobs) == 16
    for token, x, y in zip(a.token_ids, a.logprobs, b.logprobs, strict=True):
        assert x.token_id == y.token_id == token
        assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
        assert [t for t, _ in x.top] == [t for t, _ in y.top]
        assert len(x.top) == 3


def test_ties_among_the_likeliest_are_listed_alike_in_any_batch(llm: LLM) -> None:
    bf16 = LLM("paceline/tiny", dtype="bfloat16", draft="none")  # its logits tie often
    params = SamplingParams(max_tokens=40, logprobs=8)
    prompts = [PROMPT, "def add(a, b):", "The dog", "7 + 5 ="] * 2
    together = bf16.generate(prompts, params)
    alone = [bf16.generate(prompt, params)[0] for prompt in prompts]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]


def test_chat_uses_the_template(llm: LLM) -> None:
    message = {"role": "user", "content": "What is 12 + 30?"}
    (answer,) = llm.chat([message], FREE)
    rendered = "<|endoftext|><|user|>What is 12 + 30?<|end|><|assistant|>"
    ids = llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert answer.token_ids == llm.generate([ids], FREE)[0].token_ids
    two = llm.chat([[message], [message]], FREE)
    assert len(two) == 2
    parts = [{"type": "text", "text": "What is 12"}, {"type": "text", "text": " + 30?"}]
    assert llm.render_chat([{"role": "user", "content": parts}]) == ids
    with pytest.raises(PromptError, match="content: a part of type 'image_url' is not supported"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(PromptError, match="role"):
        llm.chat([{"role": "wizard", "content": "x"}])
    with pytest.raises(PromptError, match=r"a message is \[\]; give"):
        llm.chat([])


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream([PROMPT] * 3, FREE)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    check_cache(llm.engine.cache)


def test_a_stream_is_queued_with_its_first_event(llm: LLM) -> None:
    """Before that it costs nothing, and what is wrong with the arguments is raised at once."""
    stream = llm.stream([PROMPT] * 3, FREE)
    assert not llm.engine.has_work and not llm.owner.requests
    stream.close()
    unread = llm.stream(PROMPT, FREE)
    steps = llm.engine.steps
    (alone,) = llm.generate(PROMPT, FREE)
    assert alone.stats.target_steps == llm.engine.steps - steps
    assert "".join(event.text for event in unread) == alone.text
    with pytest.raises(PromptError, match="empty"):
        llm.stream("")
    with pytest.raises(ConfigError, match="2 SamplingParams"):
        llm.stream(PROMPT, [FREE, FREE])


def test_a_stream_that_is_dropped_half_read_is_released(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream([PROMPT] * 3, FREE)
    next(stream)
    assert llm.engine.has_work
    del stream
    assert not llm.engine.has_work and not llm.owner.requests
    # In the middle of another's step too, where a collector may find it.
    held = [llm.stream("The quick", FREE)]
    next(held[0])
    propose = llm.engine.drafter.propose

    def collected(plan: Plan) -> list[TokenTree]:
        held.clear()
        return propose(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "propose", collected)
        (done,) = llm.generate(PROMPT, FREE)
    assert len(done.token_ids) == 20
    assert not llm.engine.has_work and not llm.owner.requests
    check_cache(llm.engine.cache)


def test_a_closed_llm_says_so(random_pair: tuple[str, str]) -> None:
    closed = LLM(random_pair[0], draft="none", dtype="float32")
    reading = closed.stream(PROMPT, FREE)
    next(reading)
    closed.close()
    closed.close()
    calls = (
        lambda: closed.generate(PROMPT),
        lambda: closed.stream(PROMPT),
        lambda: closed.chat([{"role": "user", "content": "x"}]),
        lambda: closed.owner.step(),
        lambda: list(reading),
    )
    for call in calls:
        with pytest.raises(PacelineError, match="has been closed; make another") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_two_streams_in_turn(llm: LLM) -> None:
    expected = [llm.generate(p, FREE)[0].text for p in (PROMPT, "The quick")]
    first, second = llm.stream(PROMPT, FREE), llm.stream("The quick", FREE)
    texts = ["", ""]
    for _ in range(30):
        for place, stream in enumerate((first, second)):
            texts[place] += "".join(event.text for event in [next(stream, None)] if event)
    assert texts == expected


def test_prefix_sharing_can_be_switched_off(random_pair: tuple[str, str]) -> None:
    for shared in (True, False):
        engine = LLM(random_pair[0], draft="none", dtype="float32", prefix_sharing=shared)
        texts = [engine.generate([[7] * 40], FREE)[0].token_ids for _ in range(2)]
        assert texts[0] == texts[1]
        assert engine.engine.cache.admit(-5, [7] * 40) == (32 if shared else 0)


def test_more_requests_than_the_batch_holds(llm: LLM) -> None:
    prompts = [f"The {word}" for word in ("quick", "brown", "fox", "jumps", "over", "lazy", "dog")]
    alone = [llm.generate(prompt, FREE)[0].token_ids for prompt in prompts]
    assert [c.token_ids for c in llm.generate(prompts, FREE)] == alone


def test_bad_requests_are_refused_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(PromptError, match="empty"):
        llm.generate("")
    with pytest.raises(PromptError, match="empty"):
        llm.generate([[]])
    with pytest.raises(PromptError, match="no prompt"):
        llm.generate([])
    with pytest.raises(PromptError, match="sees 160"):
        llm.generate([[3] * 400])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        llm.generate([[10**6]])
    with pytest.raises(PromptError, match=r"a prompt has 3\.0, which is no token id"):
        llm.generate([[3.0]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="2 SamplingParams for 1 prompts"):
        llm.generate(PROMPT, [FREE, FREE])
    with pytest.raises(ConfigError, match="logit_bias"):
        llm.generate(PROMPT, SamplingParams(logit_bias={10**6: 1.0}))
    assert len(llm.generate(PROMPT, FREE)[0].token_ids) == 20


def test_none_is_no_list_of_vllms() -> None:
    """vLLM's defaults, which programs pass on; they were refused."""
    names = ("stop", "stop_token_ids", "logit_bias", "logits_processors", "prediction")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_that_is_no_name(model: object) -> None:
    with pytest.raises(ConfigError, match="give a folder, a GGUF file or a name on the hub"):
        LLM(model)  # type: ignore[arg-type]


def test_a_model_by_its_path_and_a_controller_that_is_none(random_pair: tuple[str, str]) -> None:
    target = Path(random_pair[0])
    with LLM(target, draft="none") as llm:
        assert llm.generate(PROMPT, SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="controller is 5; it lacks lengths, observe, forget"):
        LLM(target, controller=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.2}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 500}, "min_tokens"),
        ({"n": 0}, "n is"),
        ({"logprobs": 99}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_parameters_out_of_range(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        SamplingParams(**changes)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"draft": "ngram:min=4,max=2"}, ConfigError, "min"),
        ({"draft": "ngram:size=4"}, ConfigError, "no option size"),
        ({"draft": "tree:{draft},branching=2xx"}, ConfigError, "branching"),
        ({"draft": "tree"}, ConfigError, "needs a model"),
        ({"draft": "no/such/folder"}, ModelLoadError, "no/such/folder"),
        ({"draft_length": 99}, ConfigError, "draft_length"),
        ({"rule": "magic"}, ConfigError, "rule"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size"),
        ({"kv_cache_memory": 10}, CacheMemoryError, "kv_cache_memory"),
        ({"dtype": "float7"}, ConfigError, "dtype"),
        (
            {"kv_cache_dtype": "int4"},
            ConfigError,
            "kv_cache_dtype is 'int4'; use one of auto, int8",
        ),
        ({"device": "abacus"}, ConfigError, "device"),
        ({"seed": -1}, ConfigError, "seed is -1; it must be at least 0"),
        ({"seed": 2**64}, ConfigError, "seed is 18446744073709551616; it can be at most"),
    ],
)
def test_bad_options_of_the_engine(
    random_pair: tuple[str, str], options: dict[str, object], error: type[Exception], word: str
) -> None:
    if isinstance(options.get("draft"), str):
        options = {**options, "draft": str(options["draft"]).format(draft=random_pair[1])}
    with pytest.raises(error, match=word) as caught:
        LLM(random_pair[0], **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def small_cache(random_pair: tuple[str, str], draft: str | None = None) -> LLM:
    """A cache of four blocks, 64 tokens, where the model sees 160."""
    each = 2 if draft else 1
    memory = each * 4 * 16 * 2 * 2 * 16 * 4
    return LLM(random_pair[0], draft, dtype="float32", kv_cache_memory=memory, draft_length=3)


def test_the_cache_limits_a_sequence_as_the_context_does(random_pair: tuple[str, str]) -> None:
    """What the cache cannot hold ends with "length", with a draft too, to the last token."""
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    whole = LLM(random_pair[0], draft="none", dtype="float32")
    assert whole.max_model_len == whole.target.max_positions == 160
    expected = whole.generate([[7] * 20], endless)[0].token_ids
    for draft in (None, random_pair[1]):
        small = small_cache(random_pair, draft)
        assert small.max_model_len == 64
        assert small.engine.cache.num_blocks == 4
        (full,) = small.generate([[7] * 20], endless)
        assert full.finish_reason == "length"
        assert full.token_ids == expected[:44]
        # Beside another, one gives way and comes back; neither is refused.
        texts = small.generate([[7] * 20, [7] * 20], endless)
        assert [done.token_ids for done in texts] == [expected[:44]] * 2
        check_cache(small.engine.cache)


def test_a_cache_of_a_few_blocks_is_measured_within_its_room() -> None:
    """With an adaptive length the start measures forwards over what little the cache holds."""
    for draft, memory in (("ngram", 1 << 18), ("paceline/tiny-draft", 1 << 19)):
        llm = LLM("paceline/tiny", draft=draft, kv_cache_memory=memory)
        assert llm.engine.cache.num_blocks < 5
        assert llm.generate("Once", SamplingParams(max_tokens=8))[0].finish_reason == "length"
        check_cache(llm.engine.cache)


def test_a_prompt_longer_than_the_cache_is_refused(random_pair: tuple[str, str]) -> None:
    small = small_cache(random_pair)
    with pytest.raises(
        PromptError, match=r"has 64 tokens, .* sees 160 and the cache holds 64"
    ) as no:
        small.generate([[7] * 64])
    assert "raise kv_cache_memory" in str(no.value) and "\n" not in str(no.value)
    with pytest.raises(PromptError, match=r"^prompts\[1\]: the prompt has 64 tokens"):
        small.generate([[7], [7] * 64])
    with pytest.raises(PromptError, match="or raise max_model_len, if set"):
        small.with_draft(max_model_len=32).generate([[7] * 32])
    assert not small.engine.has_work
    assert len(small.generate([[7] * 63], FREE)[0].token_ids) == 1


def test_another_vocabulary_is_translated(random_pair: tuple[str, str], tmp_path: Path) -> None:
    from embedded_target import train_tokenizer

    other = train_tokenizer(["Ein ganz anderer Text mit anderen Wörtern."], 300)
    foreign = tmp_path / "foreign"
    for name in ("config.json", "model.safetensors"):
        foreign.mkdir(exist_ok=True)
        (foreign / name).write_bytes((Path(random_pair[1]) / name).read_bytes())
    other.save_pretrained(foreign)
    expected = LLM(random_pair[0], draft="none", dtype="float32").generate(PROMPT, FREE)[0]
    llm = LLM(random_pair[0], str(foreign), dtype="float32", draft_length=2)
    assert llm.generate(PROMPT, FREE)[0].token_ids == expected.token_ids
    assert llm.draft_vocabulary is not None
    assert "token-level intersection, " in llm.draft_vocabulary


def test_a_padded_vocabulary_is_fine(random_pair: tuple[str, str], tmp_path: Path) -> None:
    """The draft has 30 more rows of logits than the target; no token stands for them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    padded = tmp_path / "padded"
    model = AutoModelForCausalLM.from_pretrained(random_pair[1])
    model.resize_token_embeddings(model.config.vocab_size + 30)
    model.save_pretrained(padded)
    AutoTokenizer.from_pretrained(random_pair[1]).save_pretrained(padded)
    plain = LLM(random_pair[0], draft="none", dtype="float32")
    for target, draft in ((random_pair[0], str(padded)), (str(padded), random_pair[1])):
        llm = LLM(target, draft, dtype="float32", draft_length=3)
        for params in (FREE, SamplingParams(max_tokens=20, temperature=1.0)):
            (completion,) = llm.generate(PROMPT, params)
            assert len(completion.token_ids) >= 1
        if target == random_pair[0]:
            assert (
                llm.generate(PROMPT, FREE)[0].token_ids == plain.generate(PROMPT, FREE)[0].token_ids
            )

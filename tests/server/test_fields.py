"""What a body may hold: ignored, implemented and refused fields, nulls, messages as they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.server.api.choices import count_predicted_tokens
from paceline.server.api.protocol import ChatRequest
from support.asking import Reply, ask
from support.running_server import MODEL, Running

HELLO = [{"role": "user", "content": "Hello"}]


def chat(server: Running, messages: Any = HELLO, **fields: Any) -> Reply:
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    return ask(server.url, "/v1/chat/completions", body)


def complete(server: Running, **fields: Any) -> Reply:
    body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 4, "temperature": 0, **fields}
    return ask(server.url, "/v1/completions", body)


IGNORED = {
    "store": True,
    "metadata": {"run": "5"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "user": "x",
    "user_id": "x",
    "session_id": "x",
    "session_params": {"session_id": "x"},
    "modalities": ["text"],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "reasoning_effort": "low",
    "verbosity": "low",
}
# vllm-router writes these into every request.
ROUTER_DEFAULTS = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "stream_reasoning": True,
    "separate_reasoning": True,
    "include_reasoning": True,
}


def test_what_cannot_change_the_text_is_ignored(server: Running) -> None:
    answer = chat(server, **IGNORED)
    assert answer.status == 200
    assert answer.json["choices"] == chat(server).json["choices"]
    assert chat(server, stream=True, stream_options={"include_obfuscation": True}).status == 200


def test_what_a_router_writes_into_every_request_is_no_matter(server: Running) -> None:
    passed_on = chat(server, **ROUTER_DEFAULTS, ignore_eos=False, continue_final_message=False)
    assert passed_on.status == 200
    assert passed_on.json["choices"] == chat(server).json["choices"]
    assert complete(server, **ROUTER_DEFAULTS).status == 200
    unknown = {n: v for n, v in ROUTER_DEFAULTS.items() if n not in ChatRequest.model_fields}
    assert len(unknown) == len(ROUTER_DEFAULTS) - 2  # of chats, which have these two
    for name, default in unknown.items():
        asked = chat(server, **{name: not default})
        assert asked.status == 400 and asked.error["param"] == name


def test_unknown_nulls_are_as_good_as_left_out(server: Running) -> None:
    assert chat(server, whatever=None, audio=None, prediction=None).status == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"whatever": 1}, "unknown or unsupported field 'whatever'"),
        ({"Stop": 1}, "unknown or unsupported field 'Stop'"),  # spelt as a type of pydantic's
        ({"modalities": ["text", "audio"]}, 'modalities: answers are text; only ["text"]'),
        ({"audio": {"voice": "x"}}, "audio: answers are text; audio is not supported"),
        ({"use_beam_search": True}, "use_beam_search: beam search is not supported; sample n"),
        (
            {"length_penalty": 2.0},
            "unknown or unsupported field 'length_penalty'; leave it out",
        ),
        ({"drafter": "ngram"}, 'drafter: write "speculation": {"drafter": ...}'),
        ({"tokens": True}, "unknown or unsupported field 'tokens'"),
        ({"suffix": "x"}, "suffix: not supported; write the tokens"),
        ({"guided_regex": "x"}, 'guided_regex: write "structured_outputs": {"regex": ...}'),
        ({"bad_words": ["x"]}, "bad_words: words cannot be banned; use logit_bias"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(
    server: Running, fields: dict[str, Any], words: str
) -> None:
    refused = chat(server, **fields)
    assert refused.status == 400 and words in refused.error["message"]
    assert refused.error["param"] == next(iter(fields))


def test_a_drafter_by_its_other_name_and_by_both(server: Running) -> None:
    assert chat(server, speculation={"method": "none"}).status == 200
    refused = chat(server, speculation={"drafter": "none", "method": "none"})
    assert refused.status == 400 and refused.error["param"] == "speculation.method"


TOOL = {"type": "function", "function": {"name": "f"}}
NULLS = (
    *("model", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "response_format"),
    *("top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids", "speculation", "echo"),
    *("best_of", "suffix", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"),
    *("add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "functions"),
)


def test_explicit_nulls(server: Running) -> None:
    nulls = dict.fromkeys(NULLS)
    assert chat(server, **nulls).status == 200
    assert complete(server, **nulls).status == 200
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    assert chat(server, tools=[tool]).status == 200
    counted = chat(server, stream=True, stream_options={"include_usage": None})
    assert counted.status == 200 and "usage" not in counted.chunks[-1]


# -- messages as clients hold them -----------------------------------------------------------------

CALL = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "add", "arguments": "{}", "parsed_arguments": {}},
    "provider_specific_fields": {},
}


@pytest.mark.parametrize(
    "said",
    [
        {"annotations": [], "audio": None, "function_call": None, "refusal": None},
        {"id": "msg_1", "parsed": {"a": 1}, "provider_specific_fields": {"x": 1}},
        {"reasoning_content": "I think.", "prefix": False, "whatever a server says": [1]},
        {"content": None, "tool_calls": [CALL]},
        {"content": [{"type": "text", "text": "Hi", "annotations": [], "logprobs": None}]},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
    ],
)
def test_assistant_messages(server: Running, said: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "Hi", **said}
    assert chat(server, [*HELLO, message, *HELLO]).status == 200


def test_an_answer_can_be_sent_back_as_it_came(server: Running) -> None:
    message = chat(server).json["choices"][0]["message"]
    assert chat(server, [*HELLO, message, *HELLO]).status == 200


def test_parts(server: Running) -> None:
    part = {"type": "text", "text": "Hel", "cache_control": {"type": "ephemeral"}}
    parts = [{"role": "user", "content": [part, {"type": "text", "text": "lo"}]}]
    assert chat(server, parts).json["choices"] == chat(server).json["choices"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of type 'image_url' is not"),
        ([{"type": "input_audio", "input_audio": {}}], "a part of type 'input_audio' is not"),
        ([{"type": "file"}], "a part of type 'file' is not supported"),
        ([{"type": "odd"}], "a part of type 'odd' is not supported"),
        ([{"type": "text"}], "a part of type 'text' has no 'text'"),
        (5, "give a text, or a list of parts"),
    ],
)
def test_what_is_no_text_is_said_in_one_sentence(server: Running, content: Any, words: str) -> None:
    refused = chat(server, [{"role": "user", "content": content}])
    assert refused.status == 400
    assert refused.error["message"].startswith("messages.0.content: ")
    assert words in refused.error["message"]
    assert refused.error["param"] == "messages.0.content"


def test_a_user_s_images_are_not_passed_over(server: Running) -> None:
    refused = chat(server, [{"role": "user", "content": "What is this?", "images": ["x"]}])
    assert refused.status == 400 and "images" in refused.error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop: give a text, or a list of texts"),
        ({"stop": [5]}, "stop.0: Input should be a valid string"),
        ({"tool_choice": 5}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
        ({"response_format": "json"}, "response_format: Input should be a valid dictionary or"),
        ({"response_format": {"type": "x"}}, "response_format.type: Input should be 'text', "),
        ({"stream": "maybe"}, "stream: Input should be a valid boolean"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown or unsupported field 'stream_opt"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json: Input should be a valid"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag: structural tags are not supported",
        ),
        ({"structured_outputs": {"x": 1}}, "unknown or unsupported field 'structured_outputs.x'"),
        (
            {"stream": True, "stream_options": {"int": 1}},
            "unknown or unsupported field 'stream_opt",
        ),
        (
            {"prediction": {"content": [{"type": "file"}]}},
            "prediction.content: a part of type 'file' is not",
        ),
        ({"stop_token_ids": [10**30]}, "stop_token_ids.0: Input should be less than"),
        ({"functions": [{"name": "f"}]}, "functions: not supported; offer them as tools"),
        ({"best_of": 2}, "best_of: not supported; sample n answers with logprobs"),
    ],
)
def test_errors_name_their_field_in_one_sentence(
    server: Running, fields: dict[str, Any], message: str
) -> None:
    refused = chat(server, **fields)
    assert refused.status == 400
    assert refused.error["message"].startswith(message)
    param = refused.error["param"]
    assert param.split(".")[0] in fields and param in refused.error["message"]


def test_an_error_of_several_fields_names_none(server: Running) -> None:
    refused = chat(server, stream_options={})
    assert refused.error["message"] == "stream_options goes with stream=true only"
    assert refused.status == 400 and refused.error["param"] is None


def test_errors_of_prompts(server: Running) -> None:
    wrong = ({"a": 1}, 5.5, [1, "a"], ["a", 5], [["a"]], [10**30], [-1], None)
    for prompt in wrong:
        refused = complete(server, prompt=prompt)
        assert refused.status == 400 and refused.error["param"].startswith("prompt"), prompt


# -- as OpenAI and vLLM treat them -----------------------------------------------------------------


def test_odd_values_that_have_a_meaning(server: Running) -> None:
    greedy = complete(server).json["choices"][0]["text"]
    assert complete(server, temperature=1, top_p=0).json["choices"][0]["text"] == greedy
    for fields in ({"seed": -1}, {"seed": -7}, {"stop": ""}, {"stop": []}, {"user": ""}):
        assert complete(server, temperature=1, **fields).status == 200, fields
    assert chat(server, top_logprobs=0).status == 200
    assert (
        ask(server.url, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}).status == 200
    )
    refused = complete(server, prompt=[["a"]])
    assert refused.status == 400 and refused.error["param"] == "prompt"
    assert refused.error["message"].count(":") == 1


@pytest.mark.parametrize(("tokens", "calls"), [(1, 0), (3, 0), (15, 1), (17, 1)])
def test_a_forced_call_that_is_cut_has_its_arguments_so_far(
    server: Running, tokens: int, calls: int
) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    fields = {"tools": [tool], "tool_choice": "required", "max_tokens": tokens}
    choice = chat(server, **fields).json["choices"][0]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert [function["name"] for function in functions] == ["get_weather"] * calls
    streamed = [
        part["function"]["arguments"]
        for chunk in chat(server, **fields, stream=True).chunks
        for choice in chunk["choices"]
        for part in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(streamed) == "".join(function["arguments"] for function in functions)


# -- fields of other servers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["red", "blue (dark)"]}},
        {"structured_outputs": {"regex": "red|blue \\(dark\\)"}},
        {"structured_outputs": {"grammar": 'start: "red" | "blue (dark)"'}},
    ],
)
def test_structured_outputs(server: Running, fields: dict[str, Any]) -> None:
    text = chat(server, **fields, max_tokens=20).json["choices"][0]["message"]["content"]
    assert text in ("red", "blue (dark)")


def test_structured_json(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for fields in (
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
    ):
        text = complete(server, **fields, max_tokens=30).json["choices"][0]["text"]
        assert set(json.loads(text)) == {"a"}
    anything = complete(server, structured_outputs={"json_object": True})
    assert anything.json["choices"][0]["text"].startswith("{")
    refused = complete(server, structured_outputs={"json": schema, "regex": "a"})
    assert refused.status == 400 and refused.error["param"] == "structured_outputs"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_said_of_the_clients_field(server: Running, stream: bool) -> None:
    bad: Any = {"type": "strange"}
    schema: dict[str, Any] = {"schema": bad}
    named = {"name": "x", **schema}
    call = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": bad}}}}
    text = {"response_format": {"type": "text"}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("structured_outputs", {"structured_outputs": {"json": bad}, **text}),
        ("structured_outputs", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": named}}),
        ("tools", {"tools": [call], "tool_choice": "required"}),
    ]
    for field, fields in cases:
        refused = chat(server, **fields, stream=stream)
        assert (refused.status, refused.error["param"]) == (400, field), refused.text
    refused = complete(server, structured_outputs={"json": bad}, stream=stream)
    assert refused.error["param"] == "structured_outputs"
    body = {"input": "Once", "text": {"format": {"type": "json_schema", **named}}}
    assert ask(server.url, "/v1/responses", body).error["param"] == "text.format"
    for field, form in (
        ("output_config.format", {"output_config": {"format": {"type": "json_schema", **schema}}}),
        ("output_format", {"output_format": {"type": "json_schema", **schema}}),
    ):
        body = {"max_tokens": 4, "messages": HELLO, **form}
        said = ask(server.url, "/v1/messages", body).error["message"]
        assert said.startswith(f"{field}: grammar (json): Invalid type")


def test_usage_in_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for answer in (
        chat(server, stream=True, stream_options=options, max_tokens=20),
        complete(server, stream=True, stream_options=options, max_tokens=20),
    ):
        counts = [chunk["usage"]["completion_tokens"] for chunk in answer.chunks]
        assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == 20
        last = answer.chunks[-1]["usage"]
        assert last["total_tokens"] == last["prompt_tokens"] + 20


def test_ids_of_tokens_and_of_requests(server: Running, target: Any) -> None:
    for ask_for, prompt in ((chat, None), (complete, target.tokenizer.encode("Once upon"))):
        answer = ask_for(server, return_token_ids=True, request_id="mine").json
        assert answer["id"].endswith("-mine")
        choice = answer["choices"][0]
        told = answer if prompt is None else choice
        assert len(told["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        assert prompt is None or told["prompt_token_ids"] == prompt
        text = choice["message"]["content"] if prompt is None else choice["text"]
        decode = target.tokenizer.decode
        whole = decode([*told["prompt_token_ids"], *choice["token_ids"]])
        assert whole.endswith(text)
        chunks = ask_for(server, return_token_ids=True, stream=True).chunks
        ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]
        assert ids == choice["token_ids"]


def test_the_template_s_variables(server: Running, target: Any, monkeypatch: Any) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{% endfor %}"
        "[{{ mood }}|{{ reasoning_effort }}|{{ verbosity }}|"
        "{% if add_generation_prompt %}go{% endif %}]"
    )
    monkeypatch.setattr(server.service.tokenizer, "chat_template", template)
    answer = chat(
        server,
        [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "so"}],
        chat_template_kwargs={"mood": "good"},
        reasoning_effort="high",
        verbosity="low",
        add_generation_prompt=False,
        return_token_ids=True,
    )
    text = target.tokenizer.decode(answer.json["prompt_token_ids"])
    assert text == "<user>Hello<assistant>Hi(so)[good|high|low|]"
    continued = chat(
        server,
        [*HELLO, {"role": "assistant", "content": "Hi th", "prefix": True}],
        return_token_ids=True,
    )
    text = target.tokenizer.decode(continued.json["prompt_token_ids"])
    assert text == "<user>Hello<assistant>Hi th"
    for name in ("chat_template", "tokenize", "messages", "conversation"):
        refused = chat(server, chat_template_kwargs={name: "x"})
        assert refused.status == 400 and refused.error["param"] == "chat_template_kwargs"


# -- likelihoods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["text", "ids"])
def test_echo_scores_the_prompt(server: Running, target: Any, given: str) -> None:
    from paceline import SamplingParams

    text = "Once upon a time there was a little girl"
    ids = target.tokenizer.encode(text)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    expected = target.generate([ids], params)[0].prompt_logprobs
    prompt = text if given == "text" else ids
    fields = {"prompt": prompt, "echo": True, "logprobs": 1}
    choice = complete(server, **fields, max_tokens=1).json["choices"][0]
    assert choice["text"].startswith(text)
    columns = choice["logprobs"]
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    scores = columns["token_logprobs"][1:-1]
    assert scores == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert all(len(column) == len(ids) + 1 for column in columns.values())
    names = columns["tokens"][1:-1]
    for entry, name, likeliest in zip(expected, names, columns["top_logprobs"][1:-1], strict=True):
        # OpenAI's has the token itself, too: up to one more than was asked for.
        assert likeliest[name] == pytest.approx(entry.logprob, abs=1e-3)
        assert max(likeliest.values()) == pytest.approx(entry.top[0][1], abs=1e-3)
        assert len(likeliest) == (1 if entry.top[0][0] == entry.token_id else 2)
    assert "".join(columns["tokens"][1:]) == choice["text"]  # the first begins every text
    (chunk, *_) = complete(server, **fields, max_tokens=1, stream=True).chunks
    assert chunk["choices"][0]["logprobs"]["token_logprobs"][1:-1] == pytest.approx(
        scores, abs=1e-3
    )


@pytest.mark.parametrize("given", ["text", "ids"])
@pytest.mark.parametrize("skipped", [False, True])
def test_offsets_count_special_tokens_that_are_shown(
    server: Running, target: Any, given: str, skipped: bool
) -> None:
    text = "<|user|>Hi<|end|>there"
    prompt = text if given == "text" else target.tokenizer.encode(text)
    fields = {"echo": True, "logprobs": 0, "max_tokens": 3, "skip_special_tokens": skipped}
    choice = complete(server, prompt=prompt, **fields).json["choices"][0]
    assert ("<|user|>" in choice["text"]) == (given == "text" or not skipped)
    columns = choice["logprobs"]
    for token, offset in zip(columns["tokens"][1:], columns["text_offset"][1:], strict=True):
        hidden = token.startswith("<|") and given == "ids" and skipped
        assert hidden or choice["text"][offset:].startswith(token)


def test_receipts(server: Running, target: Any) -> None:
    sampled = {"temperature": 0.8, "receipt": True}
    for ask_for in (chat, complete):
        answer = ask_for(server, **sampled, n=2, return_token_ids=True).json
        first, second = (choice["receipt"] for choice in answer["choices"])
        assert first["tokens"] == answer["choices"][0]["token_ids"]
        assert first["weights"] == target.receipts.origin["weights"]
        assert second["sampling"]["seed"] == first["sampling"]["seed"] + 1
        chunks = ask_for(server, **sampled, stream=True).chunks
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert sum("receipt" in choice for choice in choices) == 1
        assert "receipt" not in ask_for(server).json["choices"][0]
    answer = ask(
        server.url, "/v1/responses", {"input": "Once", "max_output_tokens": 4, **sampled}
    ).json
    assert answer["receipt"]["tokens"]
    fields = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Once"}]}
    assert ask(server.url, "/v1/messages", {**fields, **sampled}).json["receipt"]["prompt"]


# -- predictions, and other fields that the engine heeds -------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_predictions(server: Running, stream: bool) -> None:
    fields = {"max_tokens": 40, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}

    def asked(**more: Any) -> tuple[str, Any]:
        answer = chat(server, **fields, **more)
        if not stream:
            body = answer.json
            return body["choices"][0]["message"]["content"], body["usage"]
        choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, answer.chunks[-1]["usage"]

    text, usage = asked()
    assert "completion_tokens_details" not in usage
    right, usage = asked(prediction={"type": "content", "content": text})
    details = usage["completion_tokens_details"]
    assert right == text
    assert details["accepted_prediction_tokens"] > 0.75 * usage["completion_tokens"]
    assert details["accepted_prediction_tokens"] > details["rejected_prediction_tokens"]
    parts = [{"type": "text", "text": "Nothing of "}, {"type": "text", "text": "the kind."}]
    wrong, usage = asked(prediction={"type": "content", "content": parts})
    assert wrong == text
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    off, usage = asked(
        prediction={"type": "content", "content": text}, speculation={"drafter": "none"}
    )
    assert off == text and "completion_tokens_details" not in usage


def test_predicted_tokens_count_whichever_drafter_drafted_them() -> None:
    """A lookup may know the same text: the answer had been written before."""
    drafted = [True, True, False, True]
    assert count_predicted_tokens([5, 6, 7, 9], drafted, [5, 6, 7, 8]) == 2
    assert count_predicted_tokens([5, 6, 7, 9], drafted, [6, 7, 9]) == 1


def test_the_stop_string_in_the_output(server: Running) -> None:
    text = complete(server, max_tokens=20).json["choices"][0]["text"]
    stop = text[6:10]
    for shown in (False, True):
        fields = {"stop": stop, "include_stop_str_in_output": shown, "max_tokens": 20}
        cut = complete(server, **fields).json["choices"][0]["text"]
        end = text.index(stop) + (len(stop) if shown else 0)
        assert cut == text[:end]
    assert complete(server, priority=-5).status == 200


def test_half_a_character_is_left_out(server: Running, target: Any) -> None:
    """A grammar writes an emoji, whose bytes are several tokens."""
    fields = {"structured_outputs": {"regex": "(🙂){8}"}, "temperature": 1, "seed": 1}
    for tokens in range(1, 8):
        for stream in (False, True):
            answer = complete(server, **fields, max_tokens=tokens, stream=stream)
            chunks = answer.chunks if stream else [answer.json]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert set(text) <= {"🙂"}, text
    for tokens in (2, 5):
        chunks = chat(server, **fields, max_tokens=tokens, stream=True).chunks
        said = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
        assert set("".join(filter(None, said))) <= {"🙂"}, said


def test_end_tokens_are_no_text_where_tools_are_about(server: Running, target: Any) -> None:
    end = min(target.end_tokens)
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"tools": [tool], "logit_bias": {str(end): 100}, "ignore_eos": True}
    assert chat(server, **fields).json["choices"][0]["message"]["content"] == ""
    shown = chat(server, **fields, skip_special_tokens=False).json["choices"][0]["message"]
    name = target.tokenizer.convert_ids_to_tokens([end])[0]
    assert shown["content"] == name * 4
    fields.pop("tools")
    assert complete(server, **fields).json["choices"][0]["text"] == ""
    said = complete(server, **fields, skip_special_tokens=False).json["choices"][0]["text"]
    assert said == name * 4

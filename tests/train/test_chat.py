"""Conversations in the layouts that users have, and finding again what the assistant said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from embedded_target import TargetConfig, train_tokenizer
from paceline import ConfigError, DataError
from paceline.train.chat import ChatWriter, Conversation, conversation_from_record
from paceline.train.data import encode_stream
from paceline.train.records import RecordError
from support.heard_stages import heard
from support.tiny_models import SENTENCES

OURS = train_tokenizer(SENTENCES, 320)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thoughts of earlier answers are dropped, a last answer without any gets an empty one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ m['content'].split('</think>')[-1].strip() }}"
    "{% elif '</think>' in m['content'] %}{{ m['content'] }}"
    "{% else %}<think>\n\n</think>\n\n{{ m['content'] }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt for an answer begins a thought, which an answer that is there does not have.
PROMPTED = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
# No end token, blanks between; the first role must be the user's, roles must alternate.
PLAIN = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m['role'] | upper }}: {{ m['content'].strip() }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


PARTS = {"role": "user", "content": [{"type": "text", "text": "2 "}, {"text": "and 3?"}]}


def speaking(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer with ChatML's tokens and a template."""
    written = OURS.backend_tokenizer.to_str().replace("<|user|>", "<|im_start|>")
    written = written.replace("<|assistant|>", "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(written), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def file_of(folder: Path, *records: Any) -> Path:
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def conversation(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(said)]


def learnt(
    tokenizer: PreTrainedTokenizerFast, file: Path, loss_on: str = "assistant"
) -> tuple[str, list[str]]:
    """A file's whole text, and the runs of tokens in it that are to be learnt."""
    stream = encode_stream(file, tokenizer, (), loss_on)
    runs: list[list[int]] = []
    before = False
    for token, wanted in zip(stream.ids.tolist(), stream.loss_mask.tolist(), strict=True):
        if wanted and not before:
            runs.append([])
        if wanted:
            runs[-1].append(token)
        before = wanted
    return tokenizer.decode(stream.ids.tolist()), [tokenizer.decode(run) for run in runs]


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"messages": conversation("2 and 3?", "5.")},
        {"messages": [PARTS, *conversation("", "5.")[1:]]},
        {"conversations": [{"from": "human", "value": "2 and 3?"}, {"from": "gpt", "value": "5."}]},
        {"turns": ["2 and 3?", "5."]},
        {"turns": conversation("2 and 3?", "5.")},
        {"text": "User: 2 and 3?\n\nAssistant: 5."},
    ],
)  # fmt: skip
@pytest.mark.parametrize("ours", [True, False])
def test_every_layout_is_the_same_conversation(
    tmp_path: Path, record: dict[str, Any], ours: bool
) -> None:
    tokenizer = OURS if ours else speaking(CHATML)
    whole, runs = learnt(tokenizer, file_of(tmp_path, record))
    if ours:
        assert whole == "<|endoftext|><|user|>2 and 3?<|end|><|assistant|>5.<|end|>"
        assert runs == ["5.<|end|>"]
    else:
        turns = ("user\n2 and 3?<|im_end|>\n", "assistant\n5.<|im_end|>\n")
        assert whole == "<|im_end|>" + "".join(f"<|im_start|>{turn}" for turn in turns)
        assert runs == ["5.<|im_end|>"]


def test_system_messages_of_both_layouts() -> None:
    said = {"role": "system", "content": "Be brief."}
    first = conversation_from_record({"messages": [{"role": "developer", "content": "Be brief."}]})
    shared = {"system": "Be brief.", "conversations": [{"from": "human", "value": "hi"}]}
    second = conversation_from_record(shared)
    assert first is not None and second is not None
    assert first.messages == [said]
    assert second.messages == [said, {"role": "user", "content": "hi"}]


def test_tools_reach_the_template_as_objects() -> None:
    template = (
        "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] }}({{ c['function']['arguments']['a'] }}){% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    record = {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            {"role": "user", "content": "7?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "8", "tool_call_id": "x"},
            {"role": "assistant", "content": "It is 8."},
        ],
    }
    conversation = conversation_from_record(record)
    assert conversation is not None
    text, spans = ChatWriter(speaking(template)).write(conversation)
    assert text.startswith("[add]<|im_start|>user")
    assert [text[a:b] for a, b in spans] == ["add(7)<|im_end|>", "It is 8.<|im_end|>"]
    with pytest.raises(RecordError, match="calls tools"):
        ChatWriter(speaking(CHATML)).write(conversation)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": "hi"}, "not a list of objects"),
        ({"messages": [{"content": "hi"}]}, "message 1 has no role"),
        (
            {"messages": [*conversation("a"), {"role": "assistant"}]},
            "message 2 has no text as content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"messages": conversation("a")}, "it has no answers"),
        ({"messages": conversation("a", "b\ud800")}, "half a surrogate pair"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "from 'narrator'"),
        ({"conversations": [{"from": "gpt"}]}, "message 1 has no text as content"),
        ({"turns": ["a question"]}, "it has no answers"),
        ({"turns": ["one", "two"], "question_id": 81}, "it has no answers"),
        ({"turns": [1, 2]}, "not a list of objects"),
        ({"ids": [1, "x"]}, "not a list of whole numbers"),
        ({"ids": [1, 2.5]}, "not a list of whole numbers"),
        ({"ids": [[1], [2, 3]]}, "not a list of whole numbers"),
        ({"ids": [1, 320]}, r"outside the vocabulary \(0 to 319\)"),
        ({"ids": [1, -1]}, "outside the vocabulary"),
        ({"ids": [1, 2], "prompt": 2}, "less than the number of ids"),
        ({"ids": []}, "its ids is empty"),
    ],
)
def test_unusable_records_are_reported(tmp_path: Path, record: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"chat.jsonl has no usable records.*line 1: .*{why}"):
        encode_stream(file_of(tmp_path, record), OURS)


def test_models_without_a_template_take_text_and_no_messages(tmp_path: Path) -> None:
    tokenizer = speaking(None)
    text = "User: hi\n\nAssistant: yo"
    assert learnt(tokenizer, file_of(tmp_path, {"text": text}))[0] == f"<|im_end|>{text}"
    with pytest.raises(DataError, match="the model has no chat template"):
        encode_stream(file_of(tmp_path, {"messages": conversation("hi", "yo")}), tokenizer)


# -- what the assistant said -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said", "runs", "searched"),
    [
        (CHATML, ("2?", "two", "3?", "three"), ["two<|im_end|>", "three<|im_end|>"], 0),
        (CHATML, ("a", "a", "assistant", "a"), ["a<|im_end|>", "a<|im_end|>"], 0),
        (PLAIN, ("2?", "two ", "3?", "three"), ["two\n", "three\n"], 0),
        (PROMPTED, ("a", "a", "3?", "t"), ["a<|im_end|>", "t<|im_end|>"], 0),
        (
            THINKING,
            ("2?", "<think>\nhm\n</think>\n\ntwo", "3?", "three"),
            ["two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"],
            1,
        ),
        (THINKING, ("2?", "two", "3?", "3", "4?"), ["two<|im_end|>", "3<|im_end|>"], 0),
    ],
)
def test_answers_are_found_in_what_templates_write(
    template: str, said: tuple[str, ...], runs: list[str], searched: int
) -> None:
    writer = ChatWriter(speaking(template))
    text, spans = writer.write(Conversation(conversation(*said)))
    assert [text[start:end] for start, end in spans] == runs
    assert writer.searched == searched


def test_a_template_that_rewrites_answers_beyond_recognition_refuses_the_line() -> None:
    upper = CHATML.replace("m['content']", "(m['content'] | upper if not loop.last else 'x')")
    with pytest.raises(RecordError, match="changes an answer"):
        ChatWriter(speaking(upper)).write(Conversation(conversation("a", "b", "c", "d")))


def test_what_the_template_refuses_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    good, bad = {"messages": conversation("2?", "two")}, {"messages": conversation("2?", "two")[1:]}
    with heard() as told:
        _, runs = learnt(speaking(PLAIN), file_of(tmp_path, bad, good, bad))
    assert len(runs) == 1
    (line,) = told.lines
    assert "2 lines left out, 1 used (line 1: the chat template refused it: roles must" in line


def test_loss_on_all_and_the_weights_of_messages(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [*conversation("2?", "two", "3?", "three")]
    messages[1]["weight"] = 0
    file = file_of(tmp_path, {"messages": messages}, {"text": "plain"})
    whole, runs = learnt(OURS, file)
    assert runs == ["three<|end|>", "plain"]
    assert learnt(OURS, file, "all") == (whole, [whole])
    with pytest.raises(ConfigError, match="--loss-on is 'user'; use one of assistant, all"):
        TargetConfig(data=(str(file),), loss_on="user")


def test_a_token_that_begins_in_the_prompt_is_not_trained_on(tmp_path: Path) -> None:
    """The blank behind ``ASSISTANT:`` becomes a part of the answer's first token."""
    tokenizer = speaking(PLAIN)
    assert len(tokenizer.encode(" the", add_special_tokens=False)) == 1
    whole, runs = learnt(tokenizer, file_of(tmp_path, {"messages": conversation("2?", "the dog")}))
    assert whole.endswith("ASSISTANT: the dog\n")
    assert runs == [" dog\n"]


def test_characters_of_several_tokens_and_tokens_of_several_characters(tmp_path: Path) -> None:
    answer = "é🙂 the garden 漢"
    _, runs = learnt(
        speaking(CHATML), file_of(tmp_path, {"messages": conversation("🙂漢", answer)})
    )
    assert runs == [answer + "<|im_end|>"]


def test_ids_after_the_prompt_are_trained_on(tmp_path: Path) -> None:
    ids = OURS.encode("What is 12? It is 12.")
    file = file_of(tmp_path, {"ids": ids, "prompt": 4}, {"ids": ids[1:], "prompt": 3})
    stream = encode_stream(file, OURS)
    assert stream.ids.tolist() == ids + ids  # the separator is put where it lacks
    assert stream.starts.tolist() == [0, len(ids)]
    expected = [position >= 4 for position in range(len(ids))]
    assert stream.loss_mask.tolist() == expected + expected
    assert encode_stream(file, OURS, (), "all").loss_mask.all()


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    ids = OURS.encode("What is 12?")
    encode_stream(file_of(tmp_path, {"ids": ids, "text": OURS.decode(ids)}), OURS)
    with pytest.raises(DataError, match="belong to another tokenizer"):
        encode_stream(file_of(tmp_path, {"ids": ids, "text": "Wer ist das?"}), OURS)


def test_separators_after_plain_text_are_trained_on(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"messages": conversation("2?", "two")}, {"text": "three"}]
    stream = encode_stream(file_of(tmp_path, *records), OURS)
    assert stream.loss_mask[stream.starts].tolist() == [True, True, False]


# -- questions -------------------------------------------------------------------------------------


def test_prompts_of_conversations() -> None:
    asked = conversation_from_record({"messages": conversation("2?", "two", "3?", "three")})
    assert asked is not None and asked.answer_positions == [1, 3]
    open_end = conversation_from_record({"messages": conversation("2?", "two", "3?")})
    assert open_end is not None and open_end.answer_positions == [1, 3]
    spec_bench = conversation_from_record(
        {"question_id": 81, "turns": ["Write.", "Rewrite.", "Again."]}
    )
    assert spec_bench is not None
    assert spec_bench.messages == conversation("Write.")
    assert conversation_from_record({"text": "A story."}) is None
    alone = conversation_from_record({"messages": [{"role": "system", "content": "Be brief."}]})
    assert alone is not None and not alone.answer_positions


def test_our_own_format_refuses_roles_that_it_has_no_token_for() -> None:
    messages = [{"role": "user", "content": "8?"}, {"role": "tool", "content": "8"}]
    with pytest.raises(RecordError, match="unknown role tool"):
        ChatWriter(OURS).write(Conversation(messages))

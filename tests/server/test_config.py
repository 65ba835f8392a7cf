"""The configuration of a server: defaults, file, flags, and what each refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.server.config import SECTIONS, ServeConfig, configure, keys, read_file, to_toml
from support.heard_stages import heard

ALL = """
[model]
model = "folder"
draft = ["ngram:min=2", "suffix"]
draft_quantize = "int4"
draft_offload = "disk"
draft_device = "cpu"
draft_length = 4
drafting = "throughput"
log_decisions = true
rule = "block"
config = "tuned.toml"
served_model_name = "mine"
lora = ["sql=adapters/sql"]
generation_config = "none"
default_temperature = 0.7
default_top_p = 0.9
default_top_k = 20
default_min_p = 0.05
default_repetition_penalty = 1.1
[engine]
backend = "reference"
quantize = "int8"
tensor_parallel = 2
offload = "disk"
weights_memory = "1G"
dtype = "float32"
device = "cpu"
threads = 3
max_model_len = 512
max_batch_size = 5
kv_cache_memory = "1G"
kv_cache_dtype = "int8"
[server]
host = "0.0.0.0"
port = 9000
log_level = "debug"
log_prompts = true
single_process = true
drain_seconds = 2.5
[limits]
max_queue = 7
deadline = 0
max_request_bytes = 1000
[security]
api_key_file = "keys"
cors_origin = ["https://chat.example"]
lora_updates = true
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def test_the_file_says_everything(tmp_path: Path) -> None:
    path = write(tmp_path, ALL)
    assert set(read_file(path)) == {entry.name for entry in keys()}
    config = configure({}, path)
    default = ServeConfig()
    assert not [e.name for e in keys() if getattr(config, e.name) == getattr(default, e.name)]
    assert config.kv_cache_memory == 2**30 and config.draft == ("ngram:min=2", "suffix")
    assert config.name == "mine" and config.deadline == 0.0


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nmax_queue = 1\ndeadline = 2\n")
    config = configure({"max_queue": 5, "draft": ["ngram"], "threads": None}, path)
    assert (config.max_queue, config.deadline, config.draft) == (5, 2, ("ngram",))


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    for text in ("", ALL):
        config = configure({}, write(tmp_path, text))
        assert configure({}, write(tmp_path, to_toml(config))) == config


def test_every_section_is_used() -> None:
    assert {entry.section for entry in keys()} == set(SECTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nmax_queu = 1", "[limits] max_queu: unknown key; the keys are max_queue, "),
        ("[server]\nmax_queue = 1", "[server] max_queue: unknown key; the keys are host, port, "),
        ("[security]\nxyzzy = 1", "the keys are api_key_file, cors_origin, lora_updates"),
        ("[limit]\nmax_queue = 1", "unknown section limit; the sections are model, engine, "),
        ("port = 1", "unknown section port; the sections are"),
        ("nonsense = 1", "the sections are model, engine, server, limits, security"),
        ('[limits]\nmax_queue = "5"', "[limits] max_queue is '5'; it must be a whole number"),
        ("[limits]\nmax_queue = true", "it must be a whole number"),
        ("[limits]\nmax_queue = -1", "it must be at least 0"),
        ("[server]\nport = 65536", "it can be at most 65535"),
        ("[limits]\ndeadline = nan", "it must be at least 0"),
        ("[limits]\ndeadline = inf", "it must be a number"),
        ("[server]\nport = 70000", "it can be at most 65535"),
        ("[server]\nhost = 1", "it must be text in quotes"),
        ('[server]\nhost = ""', "it must be text in quotes"),
        ('[server]\nlog_prompts = "yes"', "it must be true or false"),
        ('[server]\nlog_level = "loud"', "use one of debug, info, warning, error"),
        ('[engine]\nkv_cache_memory = "many"', "kv_cache_memory: 'many' is not a size"),
        ("[engine]\nkv_cache_memory = 1.5", "it must be a size"),
        ("[engine]\nkv_cache_memory = 0", "not a size above 0"),
        ('[model]\ndraft_length = "long"', "it must be auto or a whole number"),
        ("[model]\ndraft = [1]", "it must be a list of texts"),
        ('[model]\ndraft = ["none", "ngram"]', "draft 'none' cannot be combined"),
        ("[model", "is not valid TOML"),
        (f"[server]\nport = {'9' * 5000}", "is not valid TOML"),  # Python reads 4,300 digits
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        configure({}, path)
    assert message in str(caught.value)
    if "combined" not in message:
        assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml cannot be read: No such file"):
        read_file(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml is not valid TOML"):
        read_file(tmp_path / "binary.toml")


def test_other_names_are_taken_with_a_note(tmp_path: Path) -> None:
    """Those of other engines and former ones, as flags have them."""
    file = tmp_path / "old.toml"
    file.write_text('[model]\nprofile = "tuned.toml"\n[engine]\nmax_num_seqs = 3\n')
    with heard() as told:
        assert read_file(file) == {"config": "tuned.toml", "max_batch_size": 3}
    assert told.lines[0] == f"note: {file}: [model]: profile is config here"
    file.write_text('[model]\nprofile = "tuned.toml"\nconfig = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"\[model\]: profile is config here; give it once"):
        read_file(file)


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        (
            {},
            ("auto", "ngram", "eagle3:paceline/tiny-eagle3", "model:paceline/tiny-draft"),
        ),
        ({"draft": ["ngram"]}, ("ngram",)),
        ({"draft": ["none"]}, ("none",)),
        ({"model": "other"}, ("auto",)),
        ({"config": "p"}, ("auto",)),  # LLM then takes the tuned one
        ({"config": "p", "draft": ["none"]}, ("none",)),
        ({"model": "other", "draft": ["ngram", "suffix"]}, ("ngram", "suffix")),
    ],
)
def test_drafts(flags: dict[str, object], drafts: tuple[str, ...]) -> None:
    assert configure(flags).drafts == drafts

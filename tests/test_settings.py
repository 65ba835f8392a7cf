"""Settings are said once: constructors, commands, server and trainings have those of the tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer
from rich.markup import escape
from typer.testing import CliRunner

from paceline import LLM, ConfigError
from paceline.build import EngineOptions
from paceline.cli.main import app
from paceline.cli.options import expand
from paceline.server.config import keys
from paceline.settings import EngineSettings, LoadSettings, entries, setting
from paceline.settings.tuned import EngineChoice
from paceline.train import configs
from paceline.train.configs import TrainConfig
from paceline.verify.verifier import RULES

COMMANDS: Any = typer.main.get_command(app)
TRAININGS = {
    "draft": configs.DraftConfig,
    "eagle3": configs.EagleTrainConfig,
    "eagle": configs.Eagle1TrainConfig,
    "medusa": configs.MedusaTrainConfig,
}


def defaults_of(table: type, place: str) -> dict[str, Any]:
    return {entry.name: entry.default for entry in entries(table, place)}


@pytest.mark.parametrize(
    ("method", "place", "besides"),
    [
        (LLM.__init__, "LLM", {"self", "model", "draft", "config", "controller", "lora"}),
        (LLM.with_draft, "with_draft", {"self", "draft", "controller"}),
    ],
)
def test_the_keywords_of_an_llm(method: Callable[..., Any], place: str, besides: set[str]) -> None:
    parameters = inspect.signature(method).parameters
    keywords = {name: p.default for name, p in parameters.items() if name not in besides}
    assert keywords == defaults_of(EngineSettings, place)
    docs = f"{LLM.__doc__}{LLM.with_draft.__doc__}"
    assert not [name for name in keywords if f"``{name}``" not in docs]


def options(*words: str) -> dict[str, Any]:
    command = COMMANDS
    for word in words:
        command = command.commands[word]
    return {param.name: param for param in command.params}


@pytest.mark.parametrize(
    ("command", "table"),
    [
        *((name, EngineSettings) for name in ("generate", "chat", "demo", "bench", "certify")),
        *((name, EngineSettings) for name in ("profile", "doctor")),
        ("tune", LoadSettings),
    ],
)
def test_commands_take_the_engine_s_settings(command: str, table: type) -> None:
    own = options(command)
    for entry in entries(table, "command"):
        if command in ("bench", "profile") and entry.name == "max_batch_size":
            assert entry.name not in own  # it is --concurrency there
            continue
        assert entry.flag in own[entry.name].opts
        assert own[entry.name].default == entry.default
        assert own[entry.name].help.startswith(entry.help)


def test_a_server_takes_the_engine_s_settings() -> None:
    known = {entry.name: entry for entry in keys()}
    assert {entry.name for entry in entries(EngineSettings, "server")} <= set(known)
    assert all(
        options("serve")[name].help.startswith(escape(e.help))
        for name, e in known.items()
        if name != "config"  # --config is also the file of these
    )


def test_tuned_settings_fill_settings_of_the_engine() -> None:
    known = {item.name for item in fields(EngineSettings)}
    assert set(EngineChoice.__struct_fields__) <= known
    open_ones = {"draft_length", *EngineChoice.__struct_fields__}
    assert all(getattr(EngineSettings(), name) is None for name in open_ones)
    assert all(getattr(EngineOptions(), name) is not None for name in open_ones)


def test_the_rules_are_the_verifier_s() -> None:
    (rule,) = (entry for entry in entries(EngineSettings, "command") if entry.name == "rule")
    assert rule.choices == RULES


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_s_options_are_its_configuration(name: str) -> None:
    table, own = TRAININGS[name], options("train", name)
    said = defaults_of(table, "command")
    for field, default in said.items():
        told = tuple(own[field].default) if isinstance(default, tuple) else own[field].default
        assert own[field].required or told == default
    settled = {
        "eagle3": {"version", "feature_weight", "token_weight"},
        "eagle": {"version", "feature_layers", "draft_vocab_size"}
        | {"parallel", "layers", "own_embedding"},
    }
    assert {item.name for item in fields(table)} - set(said) == settled.get(name, set())


def test_every_option_says_what_it_is() -> None:
    assert issubclass(configs.HeadConfig, TrainConfig)

    def bare(command: Any, *words: str) -> list[str]:
        found = [" ".join((*words, p.name)) for p in command.params if not p.help]
        for name, inner in getattr(command, "commands", {}).items():
            found += bare(inner, *words, name)
        return found

    assert not bare(COMMANDS)


def test_a_single_option_is_a_setting_too() -> None:
    """Without a table: the default, the bound and the flag of one parameter."""

    @expand
    def command(
        wide: tuple[int, ...] = setting((), "Widths.", flags=("--wide",)),
        count: int = setting(3, "How many.", low=2),
    ) -> None:
        print(wide, count)

    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    assert run(app, ["--wide", "4", "--wide", "5"]).stdout == "(4, 5) 3\n"
    assert run(app, ["--count", "1"]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("max_batch_size", "4", "a whole number"),
        ("kv_cache_memory", "lots", "lots"),
        ("weights_memory", [1], "a size, as in 512M or 2G"),
        ("device", 3.5, "text"),
        ("dtype", ["auto"], "text"),
        ("seed", "one", "a whole number"),
        ("default_top_p", "1", "a number"),
        ("tensor_parallel", True, "a whole number"),
        ("strict", "yes", "true or false"),
        ("config", 7, "the path of tuned settings"),
    ],
)
def test_values_of_a_wrong_kind_are_one_line(name: str, value: object, what: str) -> None:
    """From Python too: the setting, the value, and what it must be; before anything is loaded."""
    with pytest.raises(ConfigError, match=what) as raised:
        LLM("no such model", **{name: value})  # type: ignore[arg-type]
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_sizes_are_taken_in_words() -> None:
    options = EngineOptions(kv_cache_memory="2M", weights_memory=5)  # type: ignore[arg-type]
    assert (options.kv_cache_memory, options.weights_memory) == (2 << 20, 5)


def test_no_memory_at_all_is_a_size_from_python() -> None:
    assert EngineOptions(weights_memory=0).weights_memory == 0

"""The public names and the signatures that users write against."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import paceline

NAMES = str.split(
    """
    AsyncLLM CostModel CostCurve DrafterCosts TargetCosts Grammar SamplingParams Drive
    CacheMemoryError ConfigError DataError EngineLostError ModelLoadError PacelineError
    PromptError UnsupportedModelError VocabularyMismatchError WriteError LLM register_backend
    Completion __version__
    """
)


def test_exports() -> None:
    assert paceline.__all__ == NAMES
    assert set(NAMES) <= set(dir(paceline))
    for name in NAMES:
        assert getattr(paceline, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        _ = paceline.Lama
    with pytest.raises(ImportError):
        exec("from paceline import Lama")


def test_every_error_is_a_paceline_error() -> None:
    errors = [name for name in NAMES if name.endswith("Error")]
    assert len(errors) == 10
    assert all(issubclass(getattr(paceline, name), paceline.PacelineError) for name in errors)


def test_sampling_params_fields() -> None:
    assert [item.name for item in fields(paceline.SamplingParams)] == str.split(
        """
        temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty
        logit_bias seed max_tokens min_tokens stop stop_token_ids ignore_eos logprobs n drafter
        draft_length grammar logits_processors skip_special_tokens skip_end_tokens
        include_stop_str_in_output prompt_logprobs prediction priority lora receipt
        """
    )


def test_llm_signature() -> None:
    names = list(inspect.signature(paceline.LLM.__init__).parameters)
    assert names[1:] == str.split(
        """
        model draft dtype device max_model_len max_batch_size kv_cache_memory draft_length rule
        prefix_sharing
        seed config backend quantize draft_quantize tensor_parallel offload
        weights_memory draft_offload draft_device kv_cache_dtype
        drafting log_decisions strict controller
        generation_config default_temperature default_top_p default_top_k default_min_p
        default_repetition_penalty lora
        """
    )
    assert list(inspect.signature(paceline.AsyncLLM).parameters) == names[1:]
    for method in ("generate", "stream", "chat", "close"):
        for kind in (paceline.LLM, paceline.AsyncLLM):
            assert callable(getattr(kind, method))


def test_completion_and_its_stats() -> None:
    from paceline.request.completion import CompletionStats

    assert [item.name for item in fields(paceline.Completion)] == str.split(
        """
        prompt text token_ids logprobs finish_reason index draft_mask stats error
        prompt_logprobs receipt stop_string
        """
    )
    assert [item.name for item in fields(CompletionStats)] == str.split(
        """
        drafted_tokens accepted_tokens acceptance_rate mean_accepted_length
        acceptance_per_position target_steps decode_seconds tokens_per_second
        time_to_first_token reached_per_position arrivals cached_tokens drafters not_drafted
        """
    )


ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "file, pattern",
    [
        ("CHANGELOG.md", r"^## (\d+\.\d+\.\d+)"),  # the newest
        ("CITATION.cff", r"^version: (\S+)"),
        ("deploy/helm/paceline/Chart.yaml", r"^version: (\S+)"),
        ("deploy/helm/paceline/Chart.yaml", r'^appVersion: "(\S+)"'),
        ("deploy/kubernetes/paceline.yaml", r'app.kubernetes.io/version: "(\S+)"'),
    ],
)
def test_the_version_elsewhere_is_that_of_the_package(file: str, pattern: str) -> None:
    said = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.M)
    assert said is not None
    assert said[1] == paceline.__version__


def test_a_version_takes_at_most_60_short_lines_of_the_changelog() -> None:
    for section in re.split(r"^(?=## )", CHANGELOG, flags=re.M)[1:]:
        name, *lines = section.splitlines()
        assert len(lines) < 60 and max(map(len, lines)) <= 160, name
        kinds = re.findall(r"^### (.*)", section, re.M)
        assert set(kinds) <= {"Added", "Changed", "Fixed", "Removed"}, name

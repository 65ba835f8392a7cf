"""What /metrics says, against what was served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import LLM
from support.running_server import MODEL, Running, serve, service_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def fresh(target: LLM) -> Iterator[Running]:
    """Nobody else's requests are in its metrics."""
    llm = target.with_draft(["paceline/tiny-draft", "ngram"], draft_length=4, max_batch_size=4)
    yield from serve(service_of(llm))


def scrape(server: Running) -> Samples:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"paceline_{name}", frozenset(labels.items())]


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over all other labels."""
    return sum(
        number
        for (sample, pairs), number in samples.items()
        if sample == f"paceline_{name}" and labels.items() <= dict(pairs).items()
    )


def test_metrics_add_up(fresh: Running) -> None:
    client = openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0)
    stats = []
    for drafter in ("model", "none", "model", "ngram"):
        params = {"drafter": drafter, "stats": True}
        answer = client.completions.create(
            model=MODEL,
            prompt="Once upon a time, there was a little girl. Once upon a time",
            max_tokens=40,
            temperature=0,
            extra_body={"speculation": params, "ignore_eos": True},
        )
        stats.append((drafter, answer.to_dict()["speculation"][0]))
    samples = scrape(fresh)
    assert value(samples, "requests_total", outcome="length") == 4
    assert value(samples, "generation_tokens_total") == 160
    assert value(samples, "requests_running") == value(samples, "requests_waiting") == 0
    assert value(samples, "prefix_cache_hit_tokens_total") > 0  # one prompt, four times
    assert value(samples, "time_to_first_token_seconds_count") == 4
    # Behind a shared prefix the first step drafts, too: its tokens have no gap of their own.
    gaps = value(samples, "inter_token_latency_seconds_count")
    assert 160 - 4 * 5 <= gaps <= 160 - 4
    for drafter in ("model", "ngram"):
        counts = [s for name, s in stats if name == drafter]
        drafted, accepted = (sum(s[f"{k}_tokens"] for s in counts) for k in ("drafted", "accepted"))
        labels = {"drafter": drafter, "adapter": ""}
        assert value(samples, "spec_decode_num_draft_tokens_total", **labels) == drafted
        assert value(samples, "spec_decode_num_accepted_tokens_total", **labels) == accepted
        per_position = total(
            samples, "spec_decode_num_accepted_tokens_per_pos_total", drafter=drafter
        )
        assert per_position == accepted
        reached = [
            total(
                samples,
                "spec_decode_num_draft_tokens_per_pos_total",
                drafter=drafter,
                position=str(position),
            )
            for position in range(4)
        ]
        drafts = value(samples, "spec_decode_num_drafts_total", **labels)
        assert drafts == reached[0] >= reached[1] >= reached[2] >= reached[3]
    assert total(samples, "spec_decode_num_drafts_total", drafter="none") == 0


def test_samples_of_a_prompt_are_no_hits_of_the_cache(fresh: Running) -> None:
    """Else a dashboard shows more hits than prompt tokens."""
    prompt = "Once upon a time there was a little girl named Lily who loved to play outside. " * 3
    client = openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0)
    name = "prefix_cache_hit_tokens_total"
    before = value(scrape(fresh), name)
    for hit in (False, True):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=4)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert value(scrape(fresh), name) - before == cached
        assert bool(cached) == hit


def test_the_cache_as_gateways_read_it(fresh: Running) -> None:
    """llm-d and the inference gateway estimate from its labels what a replica has cached."""
    cache = fresh.service.client.engine.llm.engine.cache
    labels = {
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(cache.num_blocks),
        "enable_prefix_caching": "True",
    }
    assert value(scrape(fresh), "cache_config_info", **labels) == 1


def test_dashboard_and_rules_name_metrics_that_exist(fresh: Running) -> None:
    known = {name for name, _ in scrape(fresh)}
    known |= {name.removesuffix("_bucket") for name in known}
    text = (DOCS / "grafana.json").read_text(encoding="utf-8")
    rules = (DOCS / "alerts.yml").read_text(encoding="utf-8")
    dashboard = json.loads(text)
    assert len(dashboard["panels"]) >= 8
    used = set(re.findall(r"paceline_[a-z_]+", text + rules))
    assert used and used <= known, used - known


def test_promtool_accepts_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, cwd=DOCS)
        assert done.returncode == 0, done.stdout + done.stderr

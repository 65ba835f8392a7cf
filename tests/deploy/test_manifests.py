"""The manifests say what the server does: its paths, flags, metrics and times."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fastapi import FastAPI

from paceline import LLM
from paceline.cli.main import app as commands
from paceline.server.app import create_app
from paceline.server.config import ServeConfig
from support.running_server import service_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLOSING_SECONDS = 5  # of connections, behind the drain (server/run.py)


def objects(name: str) -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")
    return [found for found in yaml.safe_load_all(text) if found]


SERVER, POOL = objects("paceline.yaml"), objects("inference-pool.yaml")
PICKER = "paceline-endpoint-picker"


def named(kind: str, name: str = "paceline") -> dict[str, Any]:
    (found,) = (o for o in SERVER + POOL if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def container(name: str = "paceline") -> dict[str, Any]:
    (found,) = named("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The flags of a command line; wrong ones fail."""
    group: Any = typer.main.get_command(commands)
    return dict(group.commands["serve"].make_context("serve", list(arguments)).params)


@pytest.fixture(scope="module")
def served() -> tuple[FastAPI, str]:
    """An application and what its /metrics shows."""
    service = service_of(LLM("paceline/tiny", draft="ngram"), "paceline/tiny")
    return create_app(service), service.client.engine.loop.metrics.render()


def test_probes_ask_what_there_is(served: tuple[FastAPI, str]) -> None:
    paths = set(served[0].openapi()["paths"])
    own, port = container(), container()["ports"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = own[probe]["httpGet"]
        assert asked["path"] in paths and asked["port"] == port["name"], probe
    assert own["readinessProbe"]["httpGet"]["path"] == "/health/ready"  # false while it drains
    assert own["livenessProbe"]["httpGet"]["path"] == "/health/live"  # true while it drains


def test_the_command_is_one_that_the_server_takes() -> None:
    params = parsed([str(argument) for argument in container()["args"]])
    assert params["host"] == "0.0.0.0"
    assert params["port"] == container()["ports"][0]["containerPort"] == ServeConfig().port


def test_nothing_is_killed_before_it_has_drained() -> None:
    pod = named("Deployment")["spec"]["template"]["spec"]
    leave = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = parsed([str(argument) for argument in container()["args"]])["drain_seconds"]
    assert pod["terminationGracePeriodSeconds"] >= leave + drain + CLOSING_SECONDS
    # Routers hear of it meanwhile: whoever asks for readiness, asks more often than that.
    assert container()["readinessProbe"]["periodSeconds"] < leave


def test_everything_selects_the_servers_and_nothing_else() -> None:
    labels = named("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        named("Deployment")["spec"]["selector"]["matchLabels"],
        named("Service")["spec"]["selector"],
        named("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        named("InferencePool")["spec"]["selector"]["matchLabels"],
    ]
    picker = named("Deployment", PICKER)["spec"]["template"]["metadata"]["labels"].items()
    for selector in selectors:
        assert selector.items() <= labels and not selector.items() <= picker
    assert named("Service", PICKER)["spec"]["selector"].items() <= picker
    target = named("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "paceline")
    assert "replicas" not in named("Deployment")["spec"]  # it would fight with the autoscaler


def test_autoscaler_and_gateway_read_metrics_that_exist(served: tuple[FastAPI, str]) -> None:
    (scaled,) = named("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert f"\n{scaled['pods']['metric']['name']} " in served[1]
    assert scaled["pods"]["metric"]["name"] == "paceline_requests_waiting"
    config = yaml.safe_load(named("ConfigMap", PICKER)["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    used = {p["pluginRef"] for profile in config["schedulingProfiles"] for p in profile["plugins"]}
    assert used <= set(plugins)
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    specs = {name: metric for name, metric in engine.items() if name.endswith("Spec")}
    assert len(specs) == 4
    for metric in specs.values():
        assert re.search(rf"^{metric}(\{{| )", served[1], re.MULTILINE), metric
    (layout,) = re.findall(rf"^{specs['cacheInfoSpec']}{{(.*)}}", served[1], re.MULTILINE)
    assert 'block_size="' in layout and 'num_gpu_blocks="' in layout  # llm-d's own defaults
    for key in ("inference.networking.k8s.io/engine-type", "llm-d.ai/engine-type"):
        pods = named("Deployment")["spec"]["template"]["metadata"]
        assert pods["labels"][key] == engine["name"]


def test_the_pool_leads_to_the_servers_and_asks_the_picker() -> None:
    pool = named("InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": container()["ports"][0]["containerPort"]}]
    reference = pool["endpointPickerRef"]
    ports = named("Service", reference["name"])["spec"]["ports"]
    assert reference["port"]["number"] in [port["port"] for port in ports]
    arguments = container(PICKER)["args"]
    assert (
        arguments[arguments.index("--pool-name") + 1] == named("InferencePool")["metadata"]["name"]
    )
    assert str(reference["port"]["number"]) in arguments


def test_compose() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    router, replicas = services["router"]["command"], services["router"]["depends_on"]
    assert len(replicas) == 2 and set(replicas) < set(services)
    for name in replicas:
        assert f"http://{name}:8000" in router
        assert parsed(services[name]["command"])["host"] == "0.0.0.0"
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()
        assert int(services[name]["stop_grace_period"][:-1]) > ServeConfig().drain_seconds + 5
    assert "--health-check-endpoint=/health/ready" in router
    docker = shutil.which("docker")
    if (
        docker
        and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        check = shlex.split("compose -f deploy/compose.yaml config --quiet")
        done = subprocess.run([docker, *check], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_the_page_says_what_is_there() -> None:
    guide = ROOT / "docs" / "guides" / "deploy.md"
    page = guide.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page)]
    assert links and all((guide.parent / link).exists() for link in links), links
    lines = [line for line in page.splitlines() if line.startswith("paceline serve")]
    assert lines and all(parsed(shlex.split(line)[2:])["port"] for line in lines)
    config = yaml.safe_load(named("ConfigMap", PICKER)["data"]["config.yaml"])
    (extractor,) = (p for p in config["plugins"] if p["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    for name, metric in engine.items():
        assert name == "name" or f"| `{name}` | `{metric}`" in page

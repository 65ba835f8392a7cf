"""The chart and the manifests under helm, kubectl and Kubernetes' schemas, where these are."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support.deploy_tools import needed

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART, MANIFESTS = DEPLOY / "helm" / "paceline", DEPLOY / "kubernetes"
# What people set: nothing, all there is, a GPU with keys and a volume.
SETTINGS = (
    (),
    ("--set", "inferencePool.enabled=true", "--set", "autoscaling.enabled=false"),
    (
        *("--set-json", 'resources={"limits":{"nvidia.com/gpu":1}}', "--set", "apiKeySecret=keys"),
        *("--set-json", 'volumes=[{"name":"models","emptyDir":{}}]'),
        *("--set-json", 'volumeMounts=[{"name":"models","mountPath":"/models"}]'),
        *("--set", "model=/models/target", "--set-json", 'args=["--max-batch-size","32"]'),
        *("--set-json", 'tolerations=[{"key":"gpu","operator":"Exists"}]'),
        *("--set-json", 'env=[{"name":"OMP_NUM_THREADS","value":"8"}]'),
    ),
)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def helm() -> Run:
    """What helm prints; whatever it complains about fails."""
    program = needed("helm")

    def run(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def validate(text: str) -> int:
    """Against the schemas of Kubernetes' own API. Returns how many objects that were."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed; see make test-routers"
    )
    foreign = importlib.import_module("kubernetes_validate.utils").SchemaNotFoundError
    known = 0
    for found in filter(None, yaml.safe_load_all(text)):
        try:
            schemas.validate(found, "1.33", strict=True)
            known += 1
        except foreign:  # an API of its own, which Kubernetes does not know
            assert found["kind"] == "InferencePool"
    return known


def test_manifests_follow_the_schemas() -> None:
    found = [validate(path.read_text(encoding="utf-8")) for path in sorted(MANIFESTS.glob("[ip]*"))]
    assert found == [6, 4]


def test_a_wrong_manifest_is_found() -> None:
    """The schemas do look: a field that does not exist, and a number that is none."""
    for right, wrong in (("maxSurge:", "maxSurges:"), ("periodSeconds: 5", "periodSeconds: often")):
        text = (MANIFESTS / "paceline.yaml").read_text(encoding="utf-8")
        assert right in text
        with pytest.raises(Exception, match=r"maxSurges|often"):
            validate(text.replace(right, wrong))


@pytest.mark.parametrize("settings", SETTINGS)
def test_helm_lints_and_renders(helm: Run, settings: tuple[str, ...]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *settings)
    validate(helm("template", "paceline", str(CHART), *settings))


def test_the_manifests_are_what_the_chart_renders(helm: Run) -> None:
    """`make manifests` writes them."""
    server = helm("template", "paceline", str(CHART))
    assert server == (MANIFESTS / "paceline.yaml").read_text(encoding="utf-8")
    only = ("--set", "inferencePool.enabled=true", "-s", "templates/inference-pool.yaml")
    pool = helm("template", "paceline", str(CHART), *only)
    assert pool == (MANIFESTS / "inference-pool.yaml").read_text(encoding="utf-8")


def test_kubectl_builds_the_folder() -> None:
    command = [needed("kubectl"), "kustomize", str(MANIFESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {found["kind"] for found in yaml.safe_load_all(done.stdout)} == {
        *("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler")
    }

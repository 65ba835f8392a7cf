"""Paceline as a Ray Serve application: replicas that come and go with the requests under way.

    pip install paceline "ray[serve]"
    cd deploy
    serve run ray_serve:build model=paceline/tiny draft=paceline/tiny-draft max_replicas=4
    serve run ray_serve:build config=paceline.toml num_gpus=1

Each replica is a whole engine, with the API of `paceline serve` (docs/reference/server.md):
completions, chats, responses and messages, streamed or not. Ray's proxy shares requests out among
replicas by how many each has under way, and lets one that leaves finish its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from paceline.server.app import create_app
from paceline.server.config import ServeConfig, configure
from paceline.server.local import load_llm, local_service
from paceline.server.security import Keys

# Of `build`, beside those of the server. Processors and GPUs are those of one replica.
RAY_DEFAULTS: Mapping[str, float] = {
    "min_replicas": 1,
    "max_replicas": 2,
    "num_cpus": 1,
    "num_gpus": 0,
}


@serve.deployment(health_check_period_s=5, graceful_shutdown_wait_loop_s=1)
@serve.ingress()
class Paceline:
    """One replica: the engine on a thread of this process, the API on its event loop."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises what ``LLM`` does; Ray then says so of the deployment."""
        self._keys = Keys.load(config.api_key_file)
        self._service = local_service(load_llm(config), config)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service, self._keys)

    def check_health(self) -> None:
        """Raises where the engine cannot go on: Ray then starts another replica."""
        if self._service.client.failure is not None:
            raise RuntimeError(f"the engine cannot go on: {self._service.client.failure}")


def build(args: Mapping[str, Any]) -> Application:
    """An application of ``NAME=VALUE``: ``config`` (a file as of `paceline serve`), ``model``,
    ``draft`` (several with commas between them), and the names of ``RAY_DEFAULTS``.

    Raises ConfigError.
    """
    own = {name: float(args.get(name, value)) for name, value in RAY_DEFAULTS.items()}
    flags: dict[str, object] = {"model": args.get("model")}
    if "draft" in args:
        flags["draft"] = [name.strip() for name in str(args["draft"]).split(",")]
    config = configure(flags, args.get("config"))
    running = config.max_batch_size or 8
    return Paceline.options(
        ray_actor_options={"num_cpus": own["num_cpus"], "num_gpus": own["num_gpus"]},
        # What a replica takes; more waits at Ray's proxy. One more replica once batches are full.
        max_ongoing_requests=running + config.max_queue,
        graceful_shutdown_timeout_s=config.drain_seconds + 10,
        autoscaling_config={
            "min_replicas": int(own["min_replicas"]),
            "max_replicas": int(own["max_replicas"]),
            "target_ongoing_requests": running,
        },
    ).bind(config)

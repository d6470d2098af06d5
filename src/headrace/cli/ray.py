"""`headrace ray MODEL`: the model on a Ray cluster, through Ray Serve. Reads flags and deploys it.

Nothing of Ray is imported before the flags are known to be good.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Annotated, Any

import typer

from headrace.cli.options import ModelArgument, ModelName, one_model
from headrace.core.errors import ConfigError
from headrace.core.version import install_extra
from headrace.policies.routing import BOUND, Routing
from headrace.ray_serve.settings import RaySettings


def ray(
    name: ModelArgument = None,
    model: ModelName = None,
    serve_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- FLAGS…]", help="Flags of `headrace serve`, for every replica, after --."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster: auto, or HOST:PORT. Without it Ray starts here."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port of Ray Serve.", min=1, max=65535)] = 8000,
    min_replicas: Annotated[int, typer.Option(help="Never fewer replicas.", min=1)] = 1,
    max_replicas: Annotated[int, typer.Option(help="Never more replicas.", min=1)] = 4,
    cpus: Annotated[float, typer.Option(help="Processors of a replica, and its threads.")] = 1.0,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs of a replica, on one node; default: --tensor-parallel with CUDA."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Ranks of a replica: processes that compute one model.", min=1)
    ] = 1,
    ingress_replicas: Annotated[
        int, typer.Option(help="Processes that take clients' requests.", min=1)
    ] = 1,
    policy: Annotated[
        Routing, typer.Option(help="How a replica is chosen; see docs/router.md.")
    ] = Routing.PREFIX,
    bound: Annotated[
        float, typer.Option(help="A replica may have this many times the mean of pending tokens.")
    ] = BOUND,
    waiting: Annotated[
        float, typer.Option(help="Seconds of prefill that may wait at each replica.")
    ] = 0.25,
    calm: Annotated[
        float, typer.Option(help="Seconds without need before a replica is taken away.")
    ] = 60.0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running in the cluster, and return.")
    ] = False,
) -> None:
    """Serve a model on a Ray cluster: replicas that Ray Serve places, watches and scales.

    The number of replicas follows the seconds of prefill that wait, places in use and the objective
    (`-- --slo ttft=1s`). Exits with 0 after Ctrl-C, 2 for settings that can't work.
    """
    chosen, flags = _model_and_flags(name, model, serve_flags or [])
    wants_gpus = "cuda" in flags
    settings = RaySettings(
        model=chosen,
        serve_flags=tuple(flags),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        cpus=cpus,
        gpus=gpus if gpus is not None else tensor_parallel if wants_gpus else 0,
        tensor_parallel=tensor_parallel,
        ingress_replicas=ingress_replicas,
        policy=policy.value,
        bound=bound,
        waiting_s=waiting,
        calm_s=calm,
    )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed.", f"{install_extra('ray')}.")
    _deploy(settings, address, host, port, detach=detach)


def _model_and_flags(
    name: str | None, model: str | None, words: list[str]
) -> tuple[str | None, list[str]]:
    """Without a MODEL, the first word after -- lands in its place."""
    if name is not None and name.startswith("-"):
        return model, [name, *words]
    return one_model(name, model), words


def _deploy(
    settings: RaySettings, address: str | None, host: str, port: int, *, detach: bool
) -> None:
    import ray as cluster
    from ray import serve

    from headrace.ray_serve.app import application

    options: dict[str, Any] = {} if address is None else {"address": address}
    cluster.init(logging_level="WARNING", **options)
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(application(settings), name="headrace", route_prefix="/")
        typer.echo(f"serving at http://{host}:{port}/v1 through Ray Serve", err=True)
        if detach:
            return
        typer.echo("`serve status` shows replicas; Ctrl-C stops", err=True)
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        typer.echo("stopping: running requests finish first", err=True)
    finally:
        if not detach:
            serve.shutdown()
            cluster.shutdown()

"""The Serve application: `serve run headrace.ray_serve.app:build model=smollm2 max_replicas=4`.

Two deployments: the ingress, and replicas behind it. Knows Ray's words for what settings.py has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from headrace.ray_serve.ingress import HeadraceIngress
from headrace.ray_serve.replica import HeadraceReplica
from headrace.ray_serve.request_router import PrefixRequestRouter
from headrace.ray_serve.scaling import PrefillPolicy
from headrace.ray_serve.settings import RaySettings, read_settings

_REPORT_S = 1.0  # between a replica's reports
_MOST = 10_000  # requests at one ingress replica


class Replica(HeadraceReplica):
    """With the names by which Ray Serve starts and stops one; it awaits both."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        await self.start(settings)

    async def __del__(self) -> None:
        await self.close()


def build(args: Mapping[str, Any]) -> Any:
    """`args` as settings.py names them."""
    return application(read_settings(args))


def application(settings: RaySettings) -> Any:
    replicas = serve.deployment(
        Replica,
        name="headrace",
        max_ongoing_requests=settings.max_ongoing,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=_REPORT_S,
            look_back_period_s=2 * _REPORT_S,
            # The rules wait for themselves. Ray's own delays count only unbroken series of the same
            # wish, and the policy wishes for something new once in `interval_s`.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function=PrefillPolicy, policy_kwargs={"settings": settings.plain()}
            ),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRequestRouter,
            request_router_kwargs={"policy": settings.policy, "bound": settings.bound},
        ),
        # A replica is a placement group of one bundle: its ranks and GPUs are on one node.
        placement_group_bundles=[settings.bundle()],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.drain_s + 10.0,
    ).bind(settings.plain())
    return serve.deployment(
        HeadraceIngress,
        name="ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=_MOST,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_s + 10.0,
    ).bind(replicas, settings.plain())

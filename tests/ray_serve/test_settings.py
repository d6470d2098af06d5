"""Settings for Ray Serve, and what they become: no Ray is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.ray_serve.scaling import PrefillPolicy
from headrace.ray_serve.settings import RaySettings, read_settings


def test_they_survive_a_configuration_file() -> None:
    settings = RaySettings(model="smollm2", serve_flags=("--slo", "ttft=1s"), max_replicas=3)
    assert read_settings(settings.plain()) == settings


def test_text_is_taken_for_numbers() -> None:
    given = {"max_replicas": "3", "cpus": "2", "serve_flags": "--slo ttft=1s"}
    settings = read_settings(given)
    assert (settings.max_replicas, settings.cpus) == (3, 2.0)
    assert settings.serve_flags == ("--slo", "ttft=1s")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_replica": 3}, "no setting 'max_replica'"),
        ({"max_replicas": "many"}, "max_replicas is 'many'; expected a number"),
        ({"min_replicas": 5, "max_replicas": 2}, "max_replicas is 2; expected 5 or more"),
        ({"policy": "fastest"}, "policy is 'fastest'; expected one of round-robin"),
        ({"serve_flags": ["--port", "80"]}, "--port is set for each replica by Ray Serve"),
        ({"gpus": 2, "tensor_parallel": 4}, "tensor_parallel is 4 and gpus is 2"),
        ({"cpus": 0}, "cpus is 0"),
    ],
)
def test_bad_ones_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(given)


def test_a_replica_has_the_threads_and_ranks_that_it_was_given() -> None:
    words = RaySettings(model="m", cpus=2, tensor_parallel=2).command(16)
    assert words[:2] == ["serve", "m"]
    assert words[words.index("--threads") + 1] == "2"
    assert words[words.index("--tensor-parallel") + 1] == "2"
    assert "--threads" not in RaySettings(cpus=0.5).command(16)
    own = RaySettings(cpus=4, serve_flags=("--threads=1",)).command(16)
    assert [word for word in own if word.startswith("--threads")] == ["--threads=1"]


def test_replicas_of_a_node_share_its_memory() -> None:
    def fraction(settings: RaySettings) -> str:
        words = settings.command(16)
        return words[words.index("--kv-fraction") + 1] if "--kv-fraction" in words else ""

    assert fraction(RaySettings(cpus=4)) == "0.125"
    assert fraction(RaySettings(cpus=64)) == "0.5"
    assert fraction(RaySettings(cpus=4, gpus=1)) == ""  # a GPU's memory is its own
    assert fraction(RaySettings(serve_flags=("--kv-tokens", "4096"))) == ""


def test_a_group_of_ranks_is_one_bundle() -> None:
    assert RaySettings(cpus=4, gpus=2, tensor_parallel=2).bundle() == {"CPU": 4, "GPU": 2}
    assert RaySettings().bundle() == {"CPU": 1}


def context(reported: dict[str, dict[str, float]], target: int, now_s: float) -> Any:
    return SimpleNamespace(
        aggregated_metrics=reported,
        running_replicas=sorted({name for values in reported.values() for name in values}),
        target_num_replicas=target,
        total_queued_requests=0.0,
        current_time=now_s,
    )


def test_rays_context_becomes_a_decision() -> None:
    policy = PrefillPolicy(RaySettings(max_replicas=8, interval_s=1.0).plain())
    waiting = {
        "pending_prefill_s": {"a": 0.5, "b": 0.4},
        "saturation": {"a": 1.0, "b": 1.0},
        "of_another": {"a": 3.0},
    }
    assert policy(context(waiting, 2, 0.0)) == (4, {})
    calm = {"saturation": {"a": 0.6, "b": 0.6}}
    assert policy(context(calm, 2, 10.0)) == (2, {})

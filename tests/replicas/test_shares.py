"""How a machine is shared out: disjoint, as equal as it can be, and refused where there is not
enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.serve_replicas import shares_of
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.settings import resolve_settings
from headrace.replicas.gpus import name_gpus
from headrace.replicas.shares import Machine, share_out


def machine(cores: int, hyper: int = 1, **more: object) -> Machine:
    """Hyper-threads as Linux numbers them: the second of each core comes after all the first."""
    places = tuple(tuple(core + cores * n for n in range(hyper)) for core in range(cores))
    return Machine(cores=places, **{"most_threads": cores, "memory_bytes": 1000, **more})  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 2), st.integers(1, 64))
def test_shares_are_disjoint_and_nearly_equal(
    cores: int, count: int, hyper: int, quota: int
) -> None:
    most = min(cores, quota)
    if count > most:
        with pytest.raises(ConfigError, match=f"replicas is {count}"):
            share_out(machine(cores, hyper, most_threads=quota), count)
        return
    shares = share_out(machine(cores, hyper, most_threads=quota), count)
    cpus = [cpu for share in shares for cpu in share.cpus]
    assert len(shares) == count
    assert sorted(cpus) == list(range(cores * hyper))  # all of them, each once
    threads = [share.threads or 0 for share in shares]
    assert min(threads) >= 1
    assert max(threads) - min(threads) <= 1
    assert sum(threads) <= most
    assert {share.memory_bytes for share in shares} == {1000 // count}


def test_what_is_shown() -> None:
    one, two = share_out(machine(4, hyper=2), 2)
    assert one.shown == "2 threads on CPU 0-1,4-5"
    assert two.shown == "2 threads on CPU 2-3,6-7"
    assert share_out(machine(2, can_pin=False), 2)[0].shown == "1 thread"


def test_threads_that_were_asked_for_are_each_replicas() -> None:
    assert [s.threads for s in share_out(machine(2, hyper=2), 2, threads=2)] == [2, 2]
    assert [s.cpus for s in share_out(machine(1, hyper=2), 2, threads=1)] == [(0,), (1,)]
    with pytest.raises(ConfigError, match="2 replicas with 3 threads each need 6") as found:
        share_out(machine(2, hyper=2), 2, threads=3)
    assert "--threads to 2" in found.value.remedy


def test_gpus() -> None:
    four = machine(2, gpus=("0", "1", "2", "3"))
    assert [s.gpus for s in share_out(four, 2, ranks=2)] == [("0", "1"), ("2", "3")]
    assert [s.gpus for s in share_out(four, 3)] == [("0",), ("1",), ("2",)]
    with pytest.raises(ConfigError, match="3 replicas with 2 GPUs each need 6 GPUs"):
        share_out(four, 3, ranks=2)
    assert share_out(four, 4)[3].shown == "GPU 3"


def test_gpus_keep_the_names_that_were_given() -> None:
    assert name_gpus(2, "") == ["0", "1"]
    assert name_gpus(2, "GPU-a, GPU-b") == ["GPU-a", "GPU-b"]
    assert name_gpus(1, "3,1") == ["3"]


def test_stages_need_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look(config: EngineConfig) -> Machine:
        asked.append(config)
        return machine(2, gpus=("0", "1", "2", "3"))

    monkeypatch.setattr("headrace.replicas.machine.look_at_machine", look)
    flags = {"replicas": 2, "device": "cuda", "tensor_parallel": 2, "pipeline_parallel": 2}
    with pytest.raises(ConfigError, match="2 replicas with 4 GPUs each need 8 GPUs"):
        shares_of(resolve_settings(flags, {}, None))
    (share,) = shares_of(resolve_settings({**flags, "replicas": 1}, {}, None))
    assert share.gpus == ("0", "1", "2", "3")
    assert [config.ranks for config in asked] == [4, 4]


def test_replicas_do_not_wait_for_ranks_of_other_hosts() -> None:
    flags = {"replicas": 2, "pipeline_parallel": 2, "rank_address": "10.0.0.1:7000"}
    with pytest.raises(ConfigError, match="wait at the same address") as found:
        shares_of(resolve_settings(flags, {}, None))
    assert "headrace route" in found.value.remedy

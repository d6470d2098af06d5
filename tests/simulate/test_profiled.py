"""A replica made of a profile does what the profile measured, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.profiles import (
    BUSY_S,
    HOST_S,
    ROUND_TRIP_S,
    SENT_S,
    TAKEN_S,
    WAY_IN_S,
    profile,
    true_s,
)

from headrace.simulate.profiled import setup_of
from headrace.simulate.serve import serve
from headrace.workload.arrivals import ClosedLoop
from headrace.workload.ask import Ask
from headrace.workload.workload import Synthetic, fixed


def test_a_request_alone_takes_its_way_its_step_and_what_serving_adds() -> None:
    ask = Ask(at_s=1.0, prompt_tokens=64, output_tokens=33)
    (served,) = serve([ask], setup_of(profile())).served
    added_s = 2 * HOST_S + SENT_S + TAKEN_S
    step_s = true_s(0, 0, 64, 65 / 2)
    way_s = WAY_IN_S + 64e-6 + ROUND_TRIP_S / 2
    assert served.ttft_s == pytest.approx(way_s + step_s + added_s, rel=1e-6)
    # Tokens 2 to 33 come after contexts of 64 to 95.
    assert served.tpot_s == pytest.approx(true_s(1, 79.5, 0, 0) + added_s, rel=1e-6)


def test_with_two_steps_in_flight_the_host_is_hidden_behind_the_device() -> None:
    """What a served token took is then the device's step and all that was added to it."""
    made = profile()
    made = replace(made, limits=replace(made.limits, steps_in_flight=2))
    assert made.serving is not None
    (alone,) = (one for one in made.serving.streams if one.streams == 1)
    ask = Ask(at_s=1.0, prompt_tokens=64, output_tokens=129)
    (served,) = serve([ask], setup_of(made)).served
    assert served.tpot_s == pytest.approx(true_s(1, 127.5, 0, 0) + alone.added_s, rel=1e-3)


@pytest.mark.parametrize("streams", [4, 16])
def test_streams_at_once_come_as_fast_as_they_were_measured(streams: int) -> None:
    workload = Synthetic(
        prompts=fixed(16), outputs=fixed(497), arrivals=ClosedLoop(clients=streams)
    )
    report = serve(workload.asks(0, streams), setup_of(profile()))
    measured = true_s(streams, 264, 0, 0) + 2 * HOST_S + (SENT_S + TAKEN_S) * streams
    assert report.served[-1].tpot_s == pytest.approx(measured, rel=0.02)


def test_without_a_server_only_the_engine_is_added() -> None:
    ask = Ask(at_s=0.0, prompt_tokens=64, output_tokens=2)
    (served,) = serve([ask], setup_of(profile(serves=False))).served
    assert served.ttft_s == pytest.approx(true_s(0, 0, 64, 65 / 2) + 2 * HOST_S)


def test_the_http_process_takes_in_one_request_after_the_other() -> None:
    edge = setup_of(profile()).edge
    assert edge.busy_s == pytest.approx(BUSY_S)
    assert edge.before_s + edge.busy_s == pytest.approx(WAY_IN_S)
    assert edge.before_token_s + edge.busy_token_s == pytest.approx(1e-6)

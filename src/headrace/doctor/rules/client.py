"""Before anything else: was it the client, the way to the server, or a counter that lies?"""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.observation import Observation, ttft_of
from headrace.doctor.rules.words import ms, percent
from headrace.doctor.step_curve import burst_rate

NUMBER = 0
_SHARE = 0.25  # of TTFT that the client may take before its numbers are worth nothing
_ROUND_TRIP_S = 0.02
_PROXY = 1.3
_DISAGREES = 0.1


def client_is_slow(seen: Observation) -> Finding | None:
    probe = seen.probe
    ttft = ttft_of(probe.short) if probe is not None else None
    if probe is None or ttft is None:
        return None
    client = probe.client
    # Sending is timed in bursts, and is late beside what those take.
    in_burst = max((t for burst in probe.bursts if (t := ttft_of(burst))), default=ttft)
    # Times of probes are medians: what is late once in a hundred times does not move them, unless
    # it is as much as the whole.
    late = (
        ("wakes up late by", client.lag_mean_s, "on average", ttft, _SHARE),
        ("wakes up late by", client.lag_p99_s, "p99", ttft, 1.0),
        ("sends late by", client.dispatch_p99_s, "p99", max(ttft, in_burst), _SHARE),
        ("looks up the name in", client.dns_s, "once", ttft, _SHARE),
    )
    bad = [
        f"it {what} {ms(value)} ({how}), beside a TTFT of {ms(beside)}"
        for what, value, how, beside, share in late
        if value and value > share * beside
    ]
    if not bad:
        return None
    return Finding(
        rule=NUMBER,
        kind=Kind.FAULT,
        symptom="this client is too slow to measure that server",
        evidence=(*bad, f"its CPU share is {percent(client.cpu_share or 0.0)} of one core"),
        cause="the machine that runs the probes is busy, or slow, or its resolver is",
        fix=("run the doctor on an idle machine near the server; times below are upper bounds",),
        gain=no_gain("the server was not measured"),
        confidence=Confidence.HIGH,
        unless="the same from another machine",
    )  # fmt: skip


def round_trip(seen: Observation) -> Finding | None:
    """Row 10."""
    probe = seen.probe
    if probe is None or probe.client.connect_s is None:
        return None
    trip = probe.client.connect_s
    set_up = trip + (probe.client.tls_s or 0.0)
    ends = sorted(a.end_s for a in probe.short if a.is_good and a.end_s is not None)
    if not ends or trip < _ROUND_TRIP_S:
        return None
    whole = ends[len(ends) // 2]
    # A request over a new connection takes its set-up and one more round trip.
    share = (set_up + trip) / whole
    if share < _SHARE:
        return None
    tls = f", TLS {ms(probe.client.tls_s)}" if probe.client.tls_s is not None else ""
    return Finding(
        rule=10,
        kind=Kind.FAULT,
        symptom="the way to the server is a large part of a short answer",
        evidence=(
            f"a round trip takes {ms(trip)}{tls}; a short answer {ms(whole)}: {percent(share)}",
        ),
        cause="network distance, TLS, or a new connection for every request",
        fix=("keep connections open, and stream", "serve from the clients' region"),
        gain=Gain(of="short answers a second", low=whole / (whole - set_up),
                  high=whole / (whole - set_up - trip) if whole > set_up + trip else None,
                  basis="connections that stay open; at most the round trip too"),
        confidence=Confidence.HIGH,
        unless="clients are nearer to the server than this machine is",
    )  # fmt: skip


def proxy_halves(seen: Observation) -> Finding | None:
    """Row 39: the same probes past the proxy."""
    if seen.probe is None or seen.direct is None:
        return None
    through = [rate for burst in seen.probe.bursts if (rate := burst_rate(burst))]
    direct = [rate for burst in seen.direct.bursts if (rate := burst_rate(burst))]
    if not through or not direct or max(direct) < _PROXY * max(through):
        return None
    slow, fast = ttft_of(seen.probe.short), ttft_of(seen.direct.short)
    evidence = [f"bursts: {max(through):,.4g} tokens/s through it, {max(direct):,.4g} past it"]
    if slow is not None and fast is not None:
        evidence.append(f"TTFT {ms(slow)} through it, {ms(fast)} past it")
    return Finding(
        rule=39,
        kind=Kind.FAULT,
        symptom="throughput through the proxy is far below that past it",
        evidence=tuple(evidence),
        cause="the gateway's CPU, or a timer in it that collects chunks of a stream",
        fix=("more workers for the gateway; its stream batching interval 0 (Ray Serve)",),
        gain=Gain(of="output tokens/s", low=min(direct) / max(through),
                  high=max(direct) / min(through), basis="measured past the proxy"),
        confidence=Confidence.HIGH,
        unless="the two were not equally loaded by others while the probes ran",
    )  # fmt: skip


def counters_disagree(seen: Observation) -> Finding | None:
    """Row 41: a counter beside what the probes got. Others' traffic only adds to it."""
    probe = seen.probe
    counted = probe.deltas.get("generation_tokens") if probe is not None else None
    if probe is None or counted is None:
        return None
    answers = [a for a in probe.answers if a.is_good]
    if not answers or not all(a.is_counted for a in answers):
        return None
    got = sum(a.tokens for a in answers)
    if counted >= (1 - _DISAGREES) * got:
        return None
    return Finding(
        rule=41,
        kind=Kind.COUNTER,
        symptom="the counter of generated tokens disagrees with the probes",
        evidence=(f"the probes received {got:,} tokens; the counter rose by {counted:,.0f}",),
        cause="a counter that is not wired, another replica behind the same address, or a cache of "
        "answers in between",
        fix=("trust the probes; scrape every replica by itself",),
        gain=no_gain("a number is wrong, nothing is slow"),
        confidence=Confidence.HIGH,
        unless="the endpoint balances over several servers and only one of them was read",
    )


def dies_while_asked(seen: Observation) -> Finding | None:
    """Row 24: answers that are cut, or take longer than someone waits."""
    finished = seen.groups.get("finished", {})
    total = sum(finished.values())
    gone = sum(value for reason, value in finished.items() if reason in ("abort", "timeout"))
    if not total and "aborted" in seen.deltas:
        gone, total = seen.deltas["aborted"], seen.deltas.get("requests", 0.0)
    # An endpoint that went away cut what it was writing: that was nobody's timeout.
    probed = seen.probe.answers if seen.probe is not None and seen.probe.stopped is None else ()
    cut = [
        a for a in probed
        if a.error and ("504" in a.error or "without a finish_reason" in a.error)
    ]  # fmt: skip
    if gone < max(3, 0.05 * total) and len(cut) < 2:
        return None
    evidence = []
    if gone:
        evidence.append(f"{gone:g} of {total:g} requests ended because their client left")
    if cut:
        evidence.append(f"{len(cut)} probes were cut: {cut[0].error}")
    e2e = seen.histograms.get("e2e")
    quantile = e2e.quantile(0.95) if e2e is not None else None
    if quantile is not None:
        evidence.append(f"the slowest twentieth of requests takes {quantile.shown(1, ' s')}")
    return Finding(
        rule=24,
        kind=Kind.FAULT,
        symptom="clients give up before their answer is there",
        evidence=tuple(evidence),
        cause="a timeout of a client or gateway that is shorter than the work",
        fix=("longer timeouts for answers than for connections; stream, so that bytes keep coming",
             "a smaller max_tokens"),
        gain=no_gain("it saves the work of answers that nobody reads"),
        confidence=Confidence.MEDIUM,
        unless="users stop answers on purpose, as in a chat",
    )  # fmt: skip


RULES: dict[int, Rule] = {
    NUMBER: client_is_slow,
    10: round_trip,
    39: proxy_halves,
    41: counters_disagree,
    24: dies_while_asked,
}

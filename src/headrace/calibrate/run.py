"""`headrace calibrate`: load a model, measure, and give a profile.

The order is that of use: step times first, since without them nothing can be predicted; then the
engine's own time, the machine's ceilings, and the way through a server. Time is shared out between
them. A Ctrl-C ends the part that runs and all that follow: what was measured is kept. Knows the
parts; measures nothing itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.assemble import Assembled, assemble, plan_memory
from headrace.backends.registry import choose_backend
from headrace.calibrate.ceilings import measure_ceilings
from headrace.calibrate.client import Server
from headrace.calibrate.host import measure_host
from headrace.calibrate.serving import measure_serving
from headrace.calibrate.steps import (
    MOST_GPU_TOKENS,
    MOST_TOKENS,
    Point,
    Steps,
    measure,
    points_for,
)
from headrace.core.config import Device, EngineConfig
from headrace.core.step import RunnerLimits
from headrace.core.version import headrace_version
from headrace.fetch.resolve import resolve_model
from headrace.hardware.profile import HostTime, Limits, Profile, Serving
from headrace.simulate.curve import Curve
from headrace.weights.load import open_weights

if TYPE_CHECKING:
    from headrace.plan.sizing import Sizing
    from headrace.tokenizer.tokenizer import Tokenizer

Tell = Callable[[str, int, int | None], None]  # what, done, of how many where known
STEPS_SHARE = 0.6  # of the time, for step times
LEAST_ROUNDS = 3


def calibrate(
    model: str | None,
    *,
    config: EngineConfig,
    seconds: float,
    tell: Tell,
    offline: bool = False,
    with_server: bool = True,
    flags: Sequence[str] = (),
) -> Profile:
    """`flags` are those that the server is started with, and mean the same as `config`."""
    path = resolve_model(model, offline=offline, progress=tell)
    served = _served(path, config)
    loaded = assemble(str(path), config=_small(config, served), offline=offline, progress=tell)
    try:
        profile, is_stopped = _in_process(loaded, seconds, tell)
        # The pool is that of a server, and not the small one that was measured with.
        limits = replace(
            profile.limits,
            total_blocks=served.total_blocks,
            context_tokens=served.context_tokens,
        )
        profile = replace(profile, limits=limits)
        if is_stopped or not with_server:
            return profile
        return _with_server(profile, loaded, model, flags, seconds * (1 - STEPS_SHARE), tell)
    finally:
        loaded.close()


def _small(config: EngineConfig, served: Sizing) -> EngineConfig:
    """With a KV pool for the points that are measured and no more: a server runs beside it, except
    on a GPU."""
    if config.kv_memory or config.kv_tokens or config.kv_fraction:
        return config
    if choose_backend(config).name is Device.CUDA:
        whole = served.total_blocks * served.sizes.block_tokens
        return replace(config, kv_tokens=min(MOST_GPU_TOKENS + 4096, whole))
    return replace(config, kv_tokens=MOST_TOKENS + 4096)


def _served(path: Path, config: EngineConfig) -> Sizing:
    """The KV pool that a server would have. Reads headers only."""
    file = open_weights(path, config.load_format)
    try:
        return plan_memory(file, choose_backend(config), config)[2]
    finally:
        file.close()


def _in_process(loaded: Assembled, seconds: float, tell: Tell) -> tuple[Profile, bool]:
    """The profile so far, and whether a Ctrl-C ended it."""
    steps = Steps(loaded.runner, loaded.spec.vocab_size)
    points = points_for(loaded.runner.limits)
    tell("preparing", 0, None)
    steps.fill(points)
    for done, point in enumerate(points):
        tell("preparing", done, len(points))
        steps.warm_up(point)
    until_s = time.monotonic() + seconds * STEPS_SHARE
    estimate = len(points) * LEAST_ROUNDS
    found, is_stopped = measure(
        steps.settled_seconds,
        points,
        is_over=lambda rounds: rounds >= LEAST_ROUNDS and time.monotonic() >= until_s,
        tell=lambda done: tell("step times", done, max(done, estimate)),
    )
    profile = Profile(
        headrace=headrace_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_facts(loaded),
        model=model_facts(loaded),
        limits=limits_of(loaded.runner.limits, loaded),
        steps=found,
        is_complete=False,
    )
    if is_stopped:
        return profile, True
    try:
        tell("the engine's own time", 0, None)
        host: tuple[HostTime, ...] = tuple(measure_host(loaded.runner))
        profile = replace(profile, host=host)
        tell("the machine's ceilings", 0, None)
        profile = replace(profile, ceilings=measure_ceilings(loaded.runner, steps))
    except KeyboardInterrupt:
        return profile, True
    return replace(profile, is_complete=True), False


def _with_server(
    profile: Profile,
    loaded: Assembled,
    model: str | None,
    flags: Sequence[str],
    seconds: float,
    tell: Tell,
) -> Profile:
    vocabulary = plain_vocabulary(loaded)
    steps = Steps(loaded.runner, loaded.spec.vocab_size)
    beside = loaded.backend.name is not Device.CUDA
    if not beside:
        loaded.close()  # two of them have no room on a GPU

    curve = Curve(profile.steps, profile.limits.padded_tokens)

    def alone(rows: int, context: int) -> float:
        if beside:
            return steps.seconds(Point(decode_rows=rows, context_tokens=context))
        return curve.seconds(decode_rows=rows, context_tokens=context)

    tell("starting a server", 0, None)
    profile = replace(profile, is_complete=False)
    until_s = time.monotonic() + seconds
    try:
        with Server(model, flags) as server:
            serving: Serving | None = measure_serving(
                server,
                alone,
                vocabulary=vocabulary,
                max_sequences=profile.limits.max_sequences,
                max_prompt=profile.limits.context_tokens - 2,
                block_tokens=profile.limits.block_tokens,
                is_over=lambda rounds: rounds >= LEAST_ROUNDS and time.monotonic() >= until_s,
                tell=lambda rounds: tell("serving", rounds, max(rounds, LEAST_ROUNDS)),
            )
            blocks = server.counters()
    except KeyboardInterrupt:
        return profile
    total = round(sum(value for name, value in blocks.items() if name.startswith("kv_blocks ")))
    limits = replace(profile.limits, total_blocks=total or profile.limits.total_blocks)
    return replace(profile, limits=limits, serving=serving, is_complete=serving is not None)


def plain_vocabulary(loaded: Assembled) -> list[int]:
    """All tokens, without a tokenizer."""
    if loaded.read_tokenizer is None:
        return list(range(loaded.spec.vocab_size))
    return plain_ids(loaded.read_tokenizer, loaded.spec.vocab_size)


def plain_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens that are plain words: of what follows them a client sees a text with each token."""
    texts = ((token, tokenizer.token_bytes(token)) for token in range(vocab_size))
    found = [token for token, text in texts if text.isascii() and text.strip().isalpha()]
    return found or list(range(vocab_size))


def limits_of(limits: RunnerLimits, loaded: Assembled) -> Limits:
    return Limits(
        max_batch_tokens=limits.max_batch_tokens,
        max_sequences=limits.max_sequences,
        total_blocks=limits.total_blocks,
        block_tokens=limits.block_tokens,
        context_tokens=limits.context_tokens,
        steps_in_flight=limits.steps_in_flight,
        max_step_growth=loaded.engine.scheduler.config.max_step_growth or 2.0,
        padded_tokens=limits.padded_tokens,
    )


def machine_facts(loaded: Assembled) -> dict[str, Any]:
    from headrace.backends.cpu import machine

    facts: dict[str, Any] = {"device": loaded.backend.name.value}
    facts |= machine.describe(loaded.config.threads)
    if loaded.backend.name is Device.CUDA:
        from headrace.backends.cuda import device

        facts["gpu"] = {name: str(value) for name, value in device.describe().items()}
    facts["features"] = list(facts.get("features") or ())
    return facts


def model_facts(loaded: Assembled) -> dict[str, Any]:
    """`fingerprint` is equal where step times can be compared: the same dimensions, the same number
    of weight bytes, the same kernels and KV type."""
    spec, backend = loaded.spec, loaded.backend.facts(loaded.config)
    weights_bytes = loaded.ledger.weights_bytes
    known = repr((asdict(spec), weights_bytes, sorted(backend.items())))
    return {
        "name": loaded.model_path.name,
        "fingerprint": hashlib.sha256(known.encode()).hexdigest()[:16],
        "family": spec.family,
        "parameters": spec.parameters,
        "layers": spec.layers,
        "vocab_size": spec.vocab_size,
        "weights_bytes": weights_bytes,
        "backend": backend,
    }

"""Step times from a profile of `headrace calibrate`, for the endpoint that is looked at.

A profile is of one model on one machine, by Headrace's own runner: for another model or another
engine it says nothing, and the note says so. What the way through the server adds to a step is part
of it where it was measured.
"""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.doctor.floor import base_name
from headrace.doctor.observation import MeasuredSteps, Observation
from headrace.hardware.profile import Profile
from headrace.simulate.curve import Curve, Line

_CONTEXT_TOKENS = 96  # about what the probes' short answers hold
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROMPTS = (1, 8, 16, 32, 64, 128, 256, 512)


def steps_of_profile(
    profile: Profile, seen: Observation
) -> tuple[MeasuredSteps | None, str | None]:
    """The steps, or why they can't be used."""
    if seen.engine.name != "headrace":
        return None, f"the profile is of Headrace's steps; this is {seen.engine.label}"
    name = str(profile.model.get("name", ""))
    if seen.model is not None and name and _plain(name) != _plain(seen.model):
        return None, f"the profile is of {name}, and this endpoint serves {seen.model}"
    try:
        curve = Curve(profile.steps)
    except ConfigError as error:
        return None, error.cause
    context = _context(seen)
    served = profile.serving.streams if profile.serving is not None else ()
    added = Line({0: 0.0, **{float(each.streams): each.added_s for each in served}})
    most = max(step.decode_rows for step in profile.steps)
    rows = [count for count in _ROWS if count <= 2 * most]

    def step(count: float, prompt: float = 0.0) -> float:
        return curve.seconds(
            decode_rows=count,
            context_tokens=context,
            prompt_tokens=prompt,
            attended_tokens=context / 2,
        )

    return (
        MeasuredSteps(
            decode_s=tuple((float(n), step(n) + added(n)) for n in rows),
            prompt_s=tuple((float(n), max(0.0, step(1, n) - step(1))) for n in _PROMPTS),
            source=f"steps of the profile of {profile.date[:10]}",
        ),
        None,
    )


def _context(seen: Observation) -> float:
    """Tokens that a token being decoded sees, on average: of the endpoint's own requests."""
    prompt, answer = seen.mean("prompt_length"), seen.mean("generation_length")
    return _CONTEXT_TOKENS if prompt is None or answer is None else prompt + answer / 2


def _plain(name: str) -> str:
    return base_name(name).rpartition("/")[2].lower()

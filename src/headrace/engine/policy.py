"""Who goes first, and how much at once: pure functions of values, and one running estimate.

No sequences are moved here; the scheduler asks and acts.
"""

from __future__ import annotations

from headrace.core.config import Policy, SchedulerConfig


def admission_key(
    config: SchedulerConfig, *, priority: int, prompt_tokens: int, arrival_s: float, order: int
) -> tuple[float, int]:
    """Waiting requests are admitted in the order of this key. It never changes while one waits:
    with SHORTEST, ageing is the same for all, so what counts is who came how much later."""
    if config.policy is Policy.PRIORITY:
        return (float(priority), order)
    if config.policy is Policy.SHORTEST:
        return (prompt_tokens + config.ageing_tokens_per_s * arrival_s, order)
    return (0.0, order)


def victim_key(*, priority: int, order: int) -> tuple[int, int]:
    """The largest is preempted first: of the lowest priority, the newest."""
    return (priority, order)


class StepTimes:
    """How long steps take, learnt from steps: what decides how much of a prompt fits beside others'
    decoding without holding them up.

    A step without prompts is the measure. Where prompts never cease, one step in so many goes
    without them, so that the measure stays true; so does one when twice or half as many decode. A
    few that decode do not hold up many that wait: where prompts are more, they get as much more.
    """

    SMOOTHING = 0.25
    MIXED_STEPS = 64  # in a row, before the measure is taken again
    GROWTH = 2.0  # where nothing was asked for

    def __init__(self, growth: float | None, first_tokens: int) -> None:
        self._growth = self.GROWTH if growth is None else growth
        self._first = first_tokens  # as long as nothing is known
        self._decode_s: float | None = None  # a step without prompts
        self._decoding = 0  # sequences in it
        self._prompt_token_s: float | None = None  # what a prompt token adds
        self._mixed_steps = 0
        self._last_tokens = first_tokens  # of prompts, in the last step that had some

    def prompt_tokens(self, budget: int, decoding: int, prompts: int) -> int:
        """How many prompt tokens may join a step in which so many decode and so many prompts are to
        be computed; 0 to take the measure."""
        if self._decode_s is None or self._mixed_steps >= self.MIXED_STEPS:
            return 0
        if not self._decoding / 2 <= decoding <= 2 * self._decoding and self._mixed_steps:
            return 0
        if self._prompt_token_s is None:
            return min(self._first, budget)
        crowd = max(1.0, prompts / max(1, decoding))
        room = crowd * (self._growth - 1) * self._decode_s / max(self._prompt_token_s, 1e-9)
        # At most twice what was seen to go well: a step that was measured wrong, on a machine that
        # others share, must not let in a chunk that takes a second. At least one: late in a long
        # prompt a single token may cost as much as a step.
        return min(max(1, min(round(room), 2 * self._last_tokens)), budget)

    def learn(self, compute_s: float, decode_tokens: int, prompt_tokens: int) -> None:
        if not decode_tokens:
            return
        if not prompt_tokens:
            same = self._decoding / 2 <= decode_tokens <= 2 * self._decoding
            self._decode_s = self._blend(self._decode_s if same else None, compute_s)
            self._decoding = decode_tokens
            self._mixed_steps = 0
        elif self._decode_s is not None:
            self._mixed_steps += 1
            self._last_tokens = prompt_tokens
            extra = max(compute_s - self._decode_s, 0.0) / prompt_tokens
            self._prompt_token_s = self._blend(self._prompt_token_s, extra)

    def _blend(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.SMOOTHING * (new - old)

"""Which sequence goes first, and how many prompt tokens join a step: pure functions of values, and
one running estimate of step times.

No sequences are moved here; the scheduler asks and acts.
"""

from __future__ import annotations

from headrace.core.config import Policy, SchedulerConfig


def admission_key(
    config: SchedulerConfig, *, priority: int, prompt_tokens: int, arrival_s: float, order: int
) -> tuple[float, int]:
    """Waiting requests are admitted in the order of this key. It does not change while a request
    waits: with SHORTEST all age at the same rate, so only the difference of arrivals matters."""
    if config.policy is Policy.PRIORITY:
        return (float(priority), order)
    if config.policy is Policy.SHORTEST:
        return (prompt_tokens + config.ageing_tokens_per_s * arrival_s, order)
    return (0.0, order)


def victim_key(*, priority: int, order: int) -> tuple[int, int]:
    """The sequence with the largest key is preempted first: the newest of the lowest priority."""
    return (priority, order)


class StepTimes:
    """How long steps take, learnt from past steps. Decides how many prompt tokens can be computed
    in a step without slowing down the sequences that decode in it.

    The baseline is a decode-only step. If there are always prompts, one step in MIXED_STEPS goes
    without them to measure it again, and so does a step when the number of decoding sequences has
    doubled or halved. Few decoding sequences must not delay many waiting ones: if there are more
    prompts than decoding sequences, prompts get proportionally more tokens.
    """

    SMOOTHING = 0.25
    MIXED_STEPS = 64  # in a row, before the baseline is measured again
    GROWTH = 2.0  # unless max_step_growth is set

    def __init__(self, growth: float | None, first_tokens: int) -> None:
        self._growth = self.GROWTH if growth is None else growth
        self._first = first_tokens  # until the cost of a prompt token is known
        self._decode_s: float | None = None  # a step without prompts
        self._decoding = 0  # sequences in it
        self._prompt_token_s: float | None = None  # what a prompt token adds
        self._mixed_steps = 0
        self._last_tokens = first_tokens  # of prompts, in the last step that had some

    def prompt_tokens(self, budget: int, decoding: int, prompts: int) -> int:
        """How many prompt tokens may join a step with so many decoding sequences and so many
        prompts to compute; 0 to measure the baseline."""
        if self._decode_s is None or self._mixed_steps >= self.MIXED_STEPS:
            return 0
        if not self._decoding / 2 <= decoding <= 2 * self._decoding and self._mixed_steps:
            return 0
        if self._prompt_token_s is None:
            return min(self._first, budget)
        crowd = max(1.0, prompts / max(1, decoding))
        room = crowd * (self._growth - 1) * self._decode_s / max(self._prompt_token_s, 1e-9)
        # At most twice the last number: one wrong measurement, on a machine that does other work
        # too, must not let in a chunk that takes a second. At least one: late in a long prompt a
        # single token may cost as much as a step.
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

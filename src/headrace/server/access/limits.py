"""What a key may use: rates and concurrency, and what one request reserves of them.

A request's size is known once it is read: its prompts, the number of continuations of each, and
max_tokens. All of it is reserved before any of it runs, and what was not generated is returned.
Takes times as arguments; knows requests, not HTTP and not who sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import HeadraceError, InvalidRequestError, TooManyRequestsError
from headrace.core.request import GenerateRequest

MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # it is not known when one of the key's requests will end
UNASKED_TOKENS = 256  # reserved for an answer without max_tokens; it may become longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    digest: bytes  # SHA-256 of the key
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    weight: int = 1  # its share of the engine, relative to other keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the engine requests of one call may take together."""

    continuations: int
    prompt_tokens: int
    asked_tokens: int  # of answers with max_tokens: their maximum
    guessed_tokens: int  # of answers without

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest]) -> Cost:
        continuations = prompt = asked = guessed = 0
        for request in requests:
            width, most = continuations_of(request), request.params.max_tokens
            if request.beam is not None:
                most = request.beam.max_tokens
            continuations += width
            prompt += len(request.prompt_token_ids)
            if request.embed:
                continue
            if most is None:
                guessed += width * UNASKED_TOKENS
            else:
                asked += width * most
        return cls(
            continuations=continuations,
            prompt_tokens=prompt,
            asked_tokens=asked,
            guessed_tokens=guessed,
        )

    @property
    def output_tokens(self) -> int:
        return self.asked_tokens + self.guessed_tokens


def continuations_of(request: GenerateRequest) -> int:
    """The cost of several that run side by side."""
    if request.embed:
        return 1
    if request.beam is not None:
        return request.beam.beam_width
    return request.params.best_of or request.params.n


class Bucket:
    """A token bucket: `capacity` per minute, all at once if none were used in the last minute. A
    request that has started may overdraw it; the next one waits until it is refilled."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        passed_s = max(0.0, now_s - self._at_s)
        return min(self.capacity, self._level + passed_s * self.capacity / MINUTE_S)

    def spend(self, count: int, now_s: float) -> None:
        """Adding a negative amount returns what was reserved and not used."""
        self._level = min(self.capacity, self.level(now_s) - count)
        self._at_s = max(self._at_s, now_s)

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Seconds until the level is at `wanted`."""
        return max(0.0, wanted - self.level(now_s)) * MINUTE_S / self.capacity


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What an HTTP request has reserved: places until its end, and tokens for those of its engine
    requests that have not started."""

    places: int
    tokens: int

    def take(self, request: GenerateRequest) -> int:
        """One of its engine requests starts: returns how many of the reserved tokens it may
        generate. Its prompt counts as used."""
        cost = Cost.of([request])
        output = max(0, min(cost.output_tokens, self.tokens - cost.prompt_tokens))
        self.tokens = max(0, self.tokens - cost.prompt_tokens - output)
        return output


class Use:
    """The usage of one key."""

    def __init__(self, key: Key, now_s: float) -> None:
        self.key = key
        self.open_places = 0  # one per open request, or one per continuation
        self.requests = _bucket(key.requests_per_minute, now_s)
        self.tokens = _bucket(key.tokens_per_minute, now_s)

    def check(self, now_s: float) -> None:
        """Raises unless a request may start at all."""
        key = self.key
        if key.max_concurrent is not None and self.open_places >= key.max_concurrent:
            raise self._crowded(1)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)) > 0:
            raise _spent(key, "requests", self.requests, wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)) > 0:
            raise _spent(key, "tokens", self.tokens, wait_s)

    def reserve(self, cost: Cost, places: int, now_s: float) -> Reservation:
        """For an open request, which holds one place already: reserves all that it asks for, or
        raises an error that says when it would fit, or that it never will."""
        self._check_places(places)
        wanted = self._check_tokens(cost, now_s)
        self.open_places += places - 1
        if self.tokens is not None:
            self.tokens.spend(wanted, now_s)
        return Reservation(places=places, tokens=wanted)

    def settle(self, reservation: Reservation, now_s: float) -> None:
        """The request is over; what was reserved for parts that never started is returned."""
        self.open_places -= reservation.places - 1
        self.spend_tokens(-reservation.tokens, now_s)

    def spend_tokens(self, count: int, now_s: float) -> None:
        if self.tokens is not None and count:
            self.tokens.spend(count, now_s)

    def free_places(self) -> int | None:
        """Free places for an open request, its own included; None: no limit."""
        most = self.key.max_concurrent
        return None if most is None else max(1, most - self.open_places + 1)

    def _check_places(self, places: int) -> None:
        most = self.key.max_concurrent
        if most is None:
            return
        if places > most:
            raise InvalidRequestError(
                f"The request asks for {places} continuations (its prompts times n or best_of); "
                f"the key {self.key.name!r} may have {most} at a time, so it can never run.",
                "Send fewer prompts at a time, or a lower n.",
                param="n",
            )
        if self.open_places - 1 + places > most:
            raise self._crowded(places)

    def _check_tokens(self, cost: Cost, now_s: float) -> int:
        bucket = self.tokens
        if bucket is None:
            return 0
        certain = cost.prompt_tokens + cost.asked_tokens
        if certain > bucket.capacity:
            raise InvalidRequestError(
                f"The request may take {certain} tokens ({cost.prompt_tokens} of prompts, up to "
                f"{cost.asked_tokens} of answers, all continuations together); the key "
                f"{self.key.name!r} has {bucket.capacity} per minute, so it can never run.",
                "Lower max_tokens or n, or send less at a time.",
                param="max_tokens" if cost.prompt_tokens <= bucket.capacity else "prompt",
            )
        wanted = min(certain + cost.guessed_tokens, bucket.capacity)
        if (wait_s := bucket.wait_s(wanted, now_s)) > 0:
            left = max(0, int(bucket.level(now_s)))
            raise TooManyRequestsError(
                f"The request may take {wanted} tokens; the key {self.key.name!r} has {left} of "
                f"its {bucket.capacity} per minute left.",
                f"Try again in {wait_s:.1f} s, or ask for less: a lower max_tokens or n.",
                retry_after_s=wait_s,
            )
        return wanted

    def _crowded(self, wanted: int) -> TooManyRequestsError:
        most = self.key.max_concurrent
        return TooManyRequestsError(
            f"The key {self.key.name!r} has {self.open_places - (wanted > 1)} continuations "
            f"running; {wanted} more would exceed its limit of {most}.",
            "Wait until one of its requests ends.",
            retry_after_s=CONCURRENT_RETRY_S,
        )

    def headers(self, now_s: float) -> dict[str, str]:
        """OpenAI's rate limit headers, for the limits that are set."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                reset_s = bucket.wait_s(bucket.capacity, now_s)
                found[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now_s))))
                found[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
        return found


def _bucket(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s)


def _spent(key: Key, what: str, bucket: Bucket, wait_s: float) -> HeadraceError:
    return TooManyRequestsError(
        f"The key {key.name!r} has used its {bucket.capacity} {what} per minute.",
        f"Try again in {wait_s:.1f} s.",
        retry_after_s=wait_s,
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"

"""Who may send requests: named keys, each with its limits and a separate prefix cache.

Takes the clock as an argument; knows nothing of HTTP beyond a header's text. Keys are stored as
SHA-256 digests and compared in constant time. limits.py has their limits, keys_file.py reads them.
Watches requests to return the tokens that were reserved and not used.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from headrace.core.errors import AuthenticationError
from headrace.core.request import ONCE, GenerateRequest
from headrace.server.access.limits import Cost, Key, Reservation, Use
from headrace.server.observe.record import RequestRecord

API_KEY_NAME = "default"  # of the key of --api-key


class KeyedCall(Protocol):
    """What this file needs of a call: its key, its method, and a place for response headers."""

    method: str
    key_name: str | None
    reply_headers: dict[str, str]
    reservation: Reservation | None


class Keys:
    """All keys; without any, no key is needed. Watches requests to count their tokens."""

    def __init__(
        self, keys: Sequence[Key] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = list(keys)
        self._clock = clock
        self._uses = {key.name: Use(key, clock()) for key in keys}
        self.weights = {key.name: key.weight for key in keys}  # each key's share of the engine
        self._digests = {key.name: key.digest for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        """The name of the key that was sent; None where the server has no keys."""
        if not self._keys:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        found: str | None = None
        for each in sent:  # the bearer token wins where both are valid
            digest = hashlib.sha256(each.strip().encode("latin-1", "replace")).digest()
            for key in self._keys:  # always all of them, so that the time taken tells nothing
                if hmac.compare_digest(key.digest, digest):
                    found = key.name
        if found is None:
            raise AuthenticationError(
                "The key is not valid for this server."
                if any(sent)
                else "This server needs a key, and the request has none.",
                "Send it as the header 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
            )
        return found

    @contextmanager
    def enter(self, call: KeyedCall) -> Iterator[None]:
        """Counts a request against its key's limits, from here to its end. GET requests are not
        counted: a scrape of /metrics should not cost an answer."""
        use = None if call.key_name is None else self._uses[call.key_name]
        if use is None or call.method != "POST":
            yield
            return
        now_s = self._clock()
        try:
            use.check(now_s)
            if use.requests is not None:
                use.requests.spend(1, now_s)
        finally:
            call.reply_headers.update(use.headers(now_s))
        use.open_places += 1
        try:
            yield
        finally:
            use.open_places -= 1
            if call.reservation is not None:
                use.settle(call.reservation, self._clock())
                call.reservation = None

    def reserve(
        self,
        call: KeyedCall,
        requests: Sequence[GenerateRequest],
        at_a_time: int | None = None,
    ) -> int:
        """Reserve what all engine requests of a call may take, or nothing. Done once per call: any
        later ones are part of it. Where they need not run together, `at_a_time` is how many
        would; returns how many may."""
        places = len(requests) if at_a_time is None else min(at_a_time, len(requests))
        use = None if call.key_name is None else self._uses.get(call.key_name)
        if use is None or call.reservation is not None:
            return places
        cost, now_s = Cost.of(requests), self._clock()
        if at_a_time is None:
            places = cost.continuations
        elif (free := use.free_places()) is not None:
            places = min(places, free)
        try:
            call.reservation = use.reserve(cost, places, now_s)
        finally:
            call.reply_headers.update(use.headers(now_s))
        return places

    def use_of(self, key_name: str | None) -> Use | None:
        """The usage of a key; None where there is no such key."""
        return None if key_name is None else self._uses.get(key_name)

    def cache_salt(self, key_name: str | None, sent: str) -> str:
        """The cache salt of a key: keys do not share cached prefixes, because timing would reveal
        another key's prompts. With a single key all requests belong to one tenant."""
        if key_name is None or len(self._keys) < 2 or sent.startswith(ONCE):
            return sent
        text = f"{key_name}\0{sent}".encode("utf-8", "surrogatepass")
        # The same after a restart, and no one else can work it out.
        return hmac.new(self._digests[key_name], text, hashlib.sha256).hexdigest()

    # -- as a watcher ----------------------------------------------------------------------------

    def on_arrival(self, record: RequestRecord) -> None:
        pass

    def on_start(self, record: RequestRecord) -> None:
        pass

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        over = count - record.reserved_tokens
        record.reserved_tokens = max(0, -over)
        if over > 0:  # more than was reserved: the key's next request waits for it
            self._spend(record.key_name, over)

    def on_end(self, record: RequestRecord) -> None:
        self._spend(record.key_name, -record.reserved_tokens)
        record.reserved_tokens = 0

    def _spend(self, key_name: str | None, count: int) -> None:
        use = None if key_name is None else self._uses.get(key_name)
        if use is not None:
            use.spend_tokens(count, self._clock())

"""Who may ask, and how much: keys with names and limits, and what keeps their caches apart.

Decides over a clock that is handed in; knows nothing of HTTP beyond a header's text. Keys are held
as SHA-256 digests and compared in constant time. Counts tokens as a watcher of requests.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import (
    AuthenticationError,
    ConfigError,
    HeadraceError,
    TooManyRequestsError,
)
from headrace.core.server_config import ServerConfig
from headrace.server.record import RequestRecord

MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # nobody knows when a request of one's own will end


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str
    digest: bytes  # SHA-256 of the key
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Bucket:
    """So many a minute, and as many at once if none were used in the last one. May be overdrawn by
    what was begun: whoever comes next waits for it."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        passed_s = max(0.0, now_s - self._at_s)
        return min(self.capacity, self._level + passed_s * self.capacity / MINUTE_S)

    def spend(self, count: int, now_s: float) -> None:
        self._level = self.level(now_s) - count
        self._at_s = max(self._at_s, now_s)

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Until the level is at `wanted`."""
        return max(0.0, wanted - self.level(now_s)) * MINUTE_S / self.capacity


class Use:
    """What one key has used."""

    def __init__(self, key: Key, now_s: float) -> None:
        self.key = key
        self.open_requests = 0
        self.requests = _bucket(key.requests_per_minute, now_s)
        self.tokens = _bucket(key.tokens_per_minute, now_s)

    def check(self, now_s: float) -> None:
        key = self.key
        if key.max_concurrent is not None and self.open_requests >= key.max_concurrent:
            raise TooManyRequestsError(
                f"The key {key.name!r} has {self.open_requests} requests open, which is its bound.",
                "Wait until one of them ends.",
                retry_after_s=CONCURRENT_RETRY_S,
            )
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)) > 0:
            raise _spent(key, "requests", self.requests, wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)) > 0:
            raise _spent(key, "tokens", self.tokens, wait_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """OpenAI's, for the limits that there are."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                reset_s = bucket.wait_s(bucket.capacity, now_s)
                found[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now_s))))
                found[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
        return found


class KeyedCall(Protocol):
    """What is needed of a call: whose it is, what kind, and a place for headers."""

    method: str
    key_name: str | None
    reply_headers: dict[str, str]


class Keys:
    """All keys; none means that nobody needs one. Watches requests to count their tokens."""

    def __init__(
        self, keys: Sequence[Key] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = list(keys)
        self._clock = clock
        self._uses = {key.name: Use(key, clock()) for key in keys}
        # The process's own, and so the same for every engine that this process starts.
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        """The name of the key that was sent; None where there are none."""
        if not self._keys:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        found: str | None = None
        for each in sent:  # the bearer's counts where both are good
            digest = hashlib.sha256(each.strip().encode("latin-1", "replace")).digest()
            for key in self._keys:  # all of them: how long it takes says nothing
                if hmac.compare_digest(key.digest, digest):
                    found = key.name
        if found is None:
            raise AuthenticationError(
                "The key is not one of this server's."
                if any(sent)
                else "This server needs a key, and none came with the request.",
                "Send it as the header 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
            )
        return found

    @contextmanager
    def enter(self, call: KeyedCall) -> Iterator[None]:
        """A request under its key's limits, from here to its end. What only looks is not counted:
        a scrape of /metrics should not cost an answer."""
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
        use.open_requests += 1
        try:
            yield
        finally:
            use.open_requests -= 1

    def cache_salt(self, key_name: str | None, sent: str) -> str:
        """Keys do not find each other's prefixes in the cache, by whose speed one could read the
        other's prompts. A lone key's requests are all of one tenant's."""
        if key_name is None or len(self._keys) < 2:
            return sent
        text = f"{key_name}\0{sent}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    # -- as a watcher ----------------------------------------------------------------------------

    def on_arrival(self, record: RequestRecord) -> None:
        self._spend(record.key_name, record.prompt_tokens)

    def on_start(self, record: RequestRecord) -> None:
        pass

    def on_tokens(self, record: RequestRecord, count: int, gap_s: float | None) -> None:
        self._spend(record.key_name, count)

    def on_end(self, record: RequestRecord) -> None:
        pass

    def _spend(self, key_name: str | None, count: int) -> None:
        use = None if key_name is None else self._uses.get(key_name)
        if use is not None and use.tokens is not None:
            use.tokens.spend(count, self._clock())


# -- from the configuration ------------------------------------------------------------------------


def read_keys(config: ServerConfig) -> tuple[Keys, list[str]]:
    """The keys that were configured, and what an operator should be warned of."""
    found: list[Key] = []
    warnings: list[str] = []
    if config.api_key is not None:
        found.append(Key(name="default", digest=_digest(config.api_key)))
    if config.api_keys_file is not None:
        path = Path(config.api_keys_file)
        found += read_keys_file(path)
        if path.stat().st_mode & 0o004:
            warnings.append(f"{path} can be read by every user of this machine: chmod o-r {path}")
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in found]
        if twice := [key.name for key in found if values.count(getattr(key, what)) > 1]:
            raise _refuse(f"has the {'name' if what == 'name' else 'key'} of {twice[0]!r} twice")
    return Keys(found), warnings


def read_keys_file(path: Path) -> list[Key]:
    """`[[keys]]` tables: name, and key or key_sha256; limits where wanted."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(f"can't be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _refuse(f"is not TOML: {error}") from error
    tables = data.pop("keys", None)
    if data:
        raise _refuse(f"has {min(data)!r} at its top; expected [[keys]] tables alone")
    if not isinstance(tables, list) or not tables:
        raise _refuse("has no [[keys]] table; expected at least one")
    return [_read_key(table, number) for number, table in enumerate(tables, start=1)]


def _read_key(table: Any, number: int) -> Key:
    if not isinstance(table, dict):
        raise _refuse(f"has something other than tables in keys: {type(table).__name__}")
    table = dict(table)
    name, key, digest = (table.pop(each, None) for each in ("name", "key", "key_sha256"))
    if not isinstance(name, str) or not name:
        raise _refuse(f"has no name for its key number {number}")
    limits = [each.name for each in fields(Key)][2:]
    if unknown := table.keys() - set(limits):
        raise _refuse(
            f"has {min(unknown)!r} for {name!r}; expected name, key or key_sha256, "
            + ", ".join(limits)
        )
    for limit, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(f"has {limit} = {value!r} for {name!r}; expected a count of at least 1")
    if (key is None) == (digest is None):
        raise _refuse(f"has {'no' if key is None else 'both'} key and key_sha256 for {name!r}")
    if key is not None and (not isinstance(key, str) or not key):
        raise _refuse(f"has a key of {name!r} that is no text")
    return Key(name=name, digest=_digest(key) if key else _read_digest(digest, name), **table)


def _read_digest(text: object, name: str) -> bytes:
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise _refuse(f"has a key_sha256 of {name!r} that is not 64 hexadecimal digits")
    return digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _bucket(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s)


def _spent(key: Key, what: str, bucket: Bucket, wait_s: float) -> HeadraceError:
    return TooManyRequestsError(
        f"The key {key.name!r} has used its {bucket.capacity} {what} a minute.",
        f"Try again in {wait_s:.1f} s.",
        retry_after_s=wait_s,
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


def _refuse(what: str) -> ConfigError:
    return ConfigError(
        f"The file of keys {what}.",
        'Write [[keys]] tables with name = "..." and key = "...".',
        param="api_keys_file",
    )

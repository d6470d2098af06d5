"""Requests from several threads, each with an id of its own, until told to stop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import TracebackType

import httpx


class Load:
    """Whole answers and streams in turn; `failed` has what went wrong."""

    def __init__(self, url: str, clients: int = 4, tokens: int = 4) -> None:
        self._url, self._tokens = url, tokens
        self._numbers = itertools.count()
        self._ending = threading.Event()
        self.answered: list[str] = []
        self.versions: set[str] = set()
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, more: int) -> None:
        """Until so many more were answered."""
        wanted = len(self.answered) + more
        waiting = threading.Event()
        while len(self.answered) < wanted and not self.failed:
            waiting.wait(0.01)

    def _run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._ending.is_set():
                number = next(self._numbers)
                ask: Callable[[httpx.Client, str], str] = (
                    self._whole if number % 2 else self._stream
                )
                name = f"load-{number}"
                try:
                    wrong = ask(client, name)
                except httpx.HTTPError as error:
                    wrong = repr(error)
                if wrong:
                    self.failed.append(f"{name}: {wrong}")
                else:
                    self.answered.append(name)

    def _body(self, name: str) -> dict[str, object]:
        return {"model": "smollm2", "prompt": f"{name}: the sky", "max_tokens": self._tokens}

    def _whole(self, client: httpx.Client, name: str) -> str:
        answer = client.post(self._url, json=self._body(name), headers={"x-request-id": name})
        self.versions.add(answer.headers.get("x-headrace-version", ""))
        return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"

    def _stream(self, client: httpx.Client, name: str) -> str:
        body = {**self._body(name), "stream": True}
        with client.stream("POST", self._url, json=body, headers={"x-request-id": name}) as answer:
            text = answer.read().decode()
            is_whole = answer.status_code == 200 and text.endswith("data: [DONE]\n\n")
            return "" if is_whole and '"error"' not in text else f"{answer.status_code} {text}"

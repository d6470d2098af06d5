"""`headrace restart [URL]`: restarts the replicas of a running server one by one, or changes what
they serve.

Asks the server (POST /restart) and follows its progress (GET /replicas); decides nothing.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from headrace.core.errors import ConfigError, HeadraceError
from headrace.server.start.run_file import running_servers

LOOK_S = 0.2
ANSWER_S = 10.0
LOOKING_S = 3600.0  # a model may have to be fetched first


class NotRestartedError(HeadraceError):
    """The server refused, or the change did not go through."""

    exit_status = 1


def restart(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server; default: the only one of yours."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Serve this model from now on.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting. Repeat it."),
    ] = None,
    key_variable: Annotated[
        str,
        typer.Option(help="The environment variable with the operators' key, if there is one."),
    ] = "HEADRACE_METRICS_KEY",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for the end.")] = False,
) -> None:
    """Restart the replicas of `headrace serve --replicas N` one by one, without a failed request.

    With --model or --set they change to another model or other settings on the way. That is looked
    at before anything stops: what can't work changes nothing. Exit status: 0 when all replicas are
    new, 1 if the server refused or went back, 2 for a command that can't work.
    """
    server = _Server(_url(url), os.environ.get(key_variable) or os.environ.get("HEADRACE_API_KEY"))
    body: dict[str, object] = {}
    if model is not None:
        body["model"] = model
    if change:
        body["settings"] = dict(map(_pair, change))
    if body:
        typer.echo("looking whether that works", err=True)
    roll = server.ask("/restart", body, LOOKING_S)["roll"]
    if not no_wait:
        _follow(server, roll)


def _follow(server: _Server, roll: dict[str, Any]) -> None:
    shown: tuple[object, object] | None = None
    while True:
        now = (roll["done"], roll["replica"])
        if now != shown and roll["state"] == "rolling":
            shown = now
            out = f", replica {roll['replica']} is out" if roll["replica"] else ""
            typer.echo(f"{roll['done']} of {roll['total']} replicas are new{out}", err=True)
        if roll["state"] == "done":
            seconds = roll["ended_s"] - roll["began_s"]
            typer.echo(f"all {roll['total']} replicas are new after {seconds:.1f} s", err=True)
            return
        if roll["state"] == "failed":
            raise NotRestartedError(
                f"The change failed, and the replicas serve what they served before: "
                f"{roll['error']}",
                "The server's log has more.",
            )
        time.sleep(LOOK_S)
        roll = server.ask("/replicas", None, ANSWER_S)["roll"]


class _Server:
    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url.rstrip("/").removesuffix("/v1"), key

    def ask(self, path: str, body: dict[str, object] | None, limit_s: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=limit_s) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(self._url, error) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise NotRestartedError(
                f"{self._url} does not answer: {why}.", "headrace ps lists your running servers."
            ) from None


def _refused(url: str, error: urllib.error.HTTPError) -> HeadraceError:
    try:
        found = json.load(error)["error"]
        text = str(found["message"])
    except (ValueError, KeyError, TypeError):
        text = f"it answered {error.code}"
    if error.code == 404:
        return NotRestartedError(
            f"{url} has no replicas to restart.", "It is for headrace serve --replicas N."
        )
    remedy = "Set the key's variable (--key-variable)." if error.code in (401, 403) else ""
    return NotRestartedError(text, remedy)


def _url(given: str | None) -> str:
    if given is not None:
        text = f"127.0.0.1{given}" if given.startswith(":") else given
        return text if "://" in text else f"http://{text}"
    servers = running_servers()
    if len(servers) == 1:
        return servers[0].url
    if not servers:
        raise ConfigError("None of your servers runs.", "Give the server's URL.")
    urls = ", ".join(server.url for server in servers)
    raise ConfigError(f"Several of your servers run: {urls}.", "Give the URL of one.")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set is {text!r}; expected NAME=VALUE.", "Write max_sequences=32.")
    return name.strip().replace("-", "_"), value

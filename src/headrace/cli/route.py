"""`headrace route URL…`: one address in front of several replicas. Reads flags and starts it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.core.errors import ConfigError
from headrace.core.server_config import LogFormat, LogLevel, ServerConfig
from headrace.core.sizes import parse_bytes
from headrace.policies.prefixes import UNKNOWN_CACHE_TOKENS
from headrace.policies.routing import BOUND, Routing

if TYPE_CHECKING:
    from headrace.router.prefill import Prefills
    from headrace.router.settings import RouterSettings
    from headrace.router.versions import Version

NAMED = ("dns:", "k8s:")  # replicas that are looked up


def route(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL…", help="Replicas of one model, such as http://10.0.0.1:8000."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    policy: Annotated[
        Routing, typer.Option(help="How a replica is chosen; see docs/router.md.")
    ] = Routing.PREFIX,
    bound: Annotated[
        float,
        typer.Option(help="With sessions: a replica may have so many times the mean of tokens."),
    ] = BOUND,
    prefix_bytes: Annotated[
        int, typer.Option(help="How many bytes of a prompt decide where it goes.", min=1)
    ] = 1 << 16,
    cache_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens that a replica's prefix cache has room for, where it does not tell.", min=1
        ),
    ] = UNKNOWN_CACHE_TOKENS,
    session_header: Annotated[
        str, typer.Option(help="The header that names a session, before the body's `user`.")
    ] = "x-session-id",
    version: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL,…:WEIGHT",
            help="A version and its weight: A/B tests and canaries. Repeat it; instead of URLs.",
        ),
    ] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL,…:SHARE",
            help="A version that gets copies of this share of requests; its answers are dropped.",
        ),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(help="A TOML file of versions, weights, shadows and users; instead of those."),
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(
            metavar="dns:NAME:PORT",
            help="Every address of this name is a replica; or, with k8s:NAMESPACE/SERVICE:PORT, "
            "every ready pod of that service. Looked up every 5 s.",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A replica that computes long prompts for the others, started with --role "
            "prefill; dns:NAME:PORT finds several. Repeat it. The others need --role decode.",
        ),
    ] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(help="A TOML file of clients' keys with names and limits.")
    ] = None,
    operator_key_variable: Annotated[
        str | None,
        typer.Option(help="The environment variable with the key for /metrics and /drain."),
    ] = None,
    internal_key_variable: Annotated[
        str | None,
        typer.Option(
            help="The environment variable with the key that replicas get instead of the client's.",
        ),
    ] = None,
    heartbeat: Annotated[
        float,
        typer.Option(
            help="Seconds after which a replica that does not answer gets no new requests; one "
            "heartbeat begins in each half of it, and has this long to be answered.",
        ),
    ] = 1.0,
    connect: Annotated[float, typer.Option(help="Seconds for a connection.")] = 2.0,
    first_byte: Annotated[
        float,
        typer.Option(help="Seconds until an answer begins, else 504."),
    ] = 300.0,
    deadline: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 3600.0,
    drain: Annotated[
        float,
        typer.Option(help="Seconds for running requests to end after SIGTERM.", min=0),
    ] = 30.0,
    tries: Annotated[
        int, typer.Option(help="How many replicas one request may be sent to.", min=1)
    ] = 8,
    max_connections: Annotated[int, typer.Option(help="Most clients at one time.", min=1)] = 4096,
    path: Annotated[
        list[str] | None, typer.Option(help="Pass this path of the replicas on too. Repeat it.")
    ] = None,
    max_bodies: Annotated[
        str, typer.Option(help="Largest size of all requests' bodies together.")
    ] = "256MiB",
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "8MiB",
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="How.")] = LogFormat.AUTO,
) -> None:
    """Send requests to several replicas: Headrace, vLLM, SGLang or llama-server.

    Requests with the same beginning go to where it is cached, unless others are idle enough. A
    replica that dies is out with its next heartbeat, and requests that had no answer yet go to
    another one. Exit status: 0 after a normal stop, 2 for settings that can't work or if no replica
    answers.
    """
    from headrace.router.discover import parse_discover
    from headrace.router.run import serve_router
    from headrace.router.settings import FORWARDED, RouterSettings
    from headrace.server.access.keys_file import read_keys
    from headrace.server.edge.listen import bind, is_loopback
    from headrace.server.observe.logs import set_up_logging

    name = None if discover is None else parse_discover(discover)
    versions = _versions(urls or [], version or [], shadow or [], routes, is_found=name is not None)
    keys, warnings = read_keys(ServerConfig(api_keys_file=api_keys_file))
    settings = RouterSettings(
        routing=policy,
        bound=bound,
        prefix_bytes=prefix_bytes,
        cache_tokens=cache_tokens,
        session_header=session_header.lower(),
        heartbeat_s=heartbeat,
        connect_s=connect,
        first_byte_s=first_byte,
        whole_s=deadline,
        drain_s=drain,
        tries=tries,
        max_connections=max_connections,
        max_body_bytes=parse_bytes(max_body, "max_body"),
        max_bodies_bytes=parse_bytes(max_bodies, "max_bodies"),
        paths=FORWARDED | set(path or []),
        operator_key=_variable("--operator-key-variable", operator_key_variable),
        internal_key=_variable("--internal-key-variable", internal_key_variable),
    )
    prefills = _prefills(prefill or [], versions, settings)
    set_up_logging(log_level, log_format)
    if not len(keys) and not is_loopback(host):
        warnings.append(
            f"{host} can be reached from other machines, and clients need no key: set "
            "--api-keys-file"
        )
    with bind(host, port) as sock:
        for line in warnings:
            _say(line)
        status = serve_router(
            versions, settings, sock, keys=keys, discover=name, prefills=prefills, say=_say
        )
    raise typer.Exit(status)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _versions(
    urls: list[str],
    versions: list[str],
    shadows: list[str],
    routes: Path | None,
    *,
    is_found: bool,
) -> tuple[Version, ...]:
    """`is_found`: replicas come by --discover."""
    from headrace.client.connection import parse_address
    from headrace.router.versions import Version, check_versions, parse_version, read_routes

    ways = {
        "URLs": bool(urls),
        "--version": bool(versions),
        "--routes": routes is not None,
        "--discover": is_found,
    }
    given = [name for name, is_given in ways.items() if is_given]
    if not given:
        raise ConfigError("No replica is given.", "Give URLs: headrace route http://HOST:PORT …")
    if len(given) > 1 or (shadows and routes is not None):
        both = " and ".join(given if len(given) > 1 else ["--shadow", *given])
        raise ConfigError(f"{both} are given.", "Keep one of them.")
    if routes is not None:
        return check_versions(read_routes(routes))
    copies = [parse_version(text, is_shadow=True) for text in shadows]
    if versions:
        return check_versions([*map(parse_version, versions), *copies])
    return check_versions([Version(name="", addresses=tuple(map(parse_address, urls))), *copies])


def _prefills(
    texts: list[str], versions: tuple[Version, ...], settings: RouterSettings
) -> Callable[[], Prefills] | None:
    """Made when the router's loop runs."""
    from headrace.client.connection import parse_address
    from headrace.router.discover import parse_discover
    from headrace.router.prefill import Prefills

    if not texts:
        return None
    if settings.internal_key is None:
        raise ConfigError(
            "--prefill is given without --internal-key-variable: engines hand blocks only to those "
            "that have the same key.",
            "Give the key that the replicas have as --api-key.",
        )
    if len(versions) > 1:
        raise ConfigError(
            "--prefill is given with several versions, which can't use each other's blocks.",
            "Start a router for each of them.",
        )
    names = [parse_discover(text) for text in texts if text.startswith(NAMED)]
    addresses = [parse_address(text) for text in texts if not text.startswith(NAMED)]
    if len(names) > 1:
        raise ConfigError("--prefill has two names to look up.", "Keep one of them.")
    urls = [each.url for each in addresses]
    answering = {each.url for version in versions for each in version.addresses}
    if again := [url for url in urls if urls.count(url) > 1 or url in answering]:
        raise ConfigError(f"{again[0]} is given twice.", "Give each replica once.")
    name = names[0] if names else None
    return lambda: Prefills(addresses, settings, name=name)


def _variable(flag: str, name: str | None) -> str | None:
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"${name} is not set.", f"Set it, or leave {flag} out.")
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"${name} can't be sent in a header.", "Use printable ASCII.")
    return value

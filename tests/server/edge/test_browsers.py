"""Web pages: which may use a server, and how those that may not are kept out. Programs are not
troubled by any of it."""

from __future__ import annotations

import asyncio
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.server.conftest import RunningServer, StartServer
from tests.server.raw_client import CHAT, GOOD, Answer, RawClient

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, InvalidRequestError
from headrace.core.server_config import ServerConfig
from headrace.core.settings import SettingsFile, resolve_settings
from headrace.policies.queue import QueueBounds
from headrace.server.access.keys_file import read_keys
from headrace.server.api.route import Route
from headrace.server.edge.app import App
from headrace.server.edge.browsers import browser_warnings
from headrace.server.request.call import AnyReply, Call, StreamReply, json_reply
from headrace.server.request.schema import ChatRequest
from headrace.server.request.service import Service

PAGE = "https://app.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}


async def good(service: Service, call: Call) -> AnyReply:
    return json_reply({"length": len(call.body)})


async def bad(service: Service, call: Call) -> AnyReply:
    raise InvalidRequestError("Not so.")


async def stream(service: Service, call: Call) -> AnyReply:
    async def chunks() -> Any:
        yield b"data: 1\n\n"

    return StreamReply(chunks=chunks())


ROUTES = [
    Route(path="/health", endpoint=good, is_open=True),
    Route(path="/good", endpoint=good),
    Route(path="/ask", endpoint=good, methods=("POST",), request=ChatRequest),
    Route(path="/bad", endpoint=bad),
    Route(path="/stream", endpoint=stream),
]


class Asked:
    """The application, without a server around it."""

    def __init__(self, **settings: Any) -> None:
        config = ServerConfig(**settings)
        service = Service(
            config=config,
            engine_config=EngineConfig(),
            model=cast("Any", None),
            supervisor=cast("Any", None),
            queue=QueueBounds.from_config(config),
            keys=read_keys(config)[0],
        )
        self._app = App(service, ROUTES)

    def __call__(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        sent: list[Any] = []
        headers = {"host": "localhost:8000", **(headers or {})}
        headers |= {"content-length": str(len(body))} if body else {}

        async def run() -> None:
            messages = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive() -> Any:
                message = next(messages, None)
                return message if message is not None else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "query_string": b"",
                "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            }
            await self._app(scope, receive, send)

        asyncio.run(run())
        start, *rest = sent
        got = {k.decode(): v.decode() for k, v in start["headers"]}
        return Answer(start["status"], got, b"".join(each.get("body", b"") for each in rest))


def cors_headers(answer: Answer) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


# -- CORS ------------------------------------------------------------------------------------------


def test_a_preflight_of_an_allowed_page() -> None:
    ask = Asked(cors_origin=["http://other:3000", PAGE], api_key="secret")
    wanted = "authorization,content-type,x-stainless-lang"
    answer = ask("OPTIONS", "/ask", {**PREFLIGHT, "access-control-request-headers": wanted})
    assert (answer.status, answer.body) == (204, b"")  # without a key: browsers send none
    assert "content-length" not in answer.headers
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == wanted
    assert {"GET", "POST", "DELETE"} <= set(
        answer.headers["access-control-allow-methods"].split(", ")
    )
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "Origin" in answer.headers["vary"].split(", ")
    assert "access-control-allow-credentials" not in answer.headers
    # Which paths there are is not said.
    other = ask("OPTIONS", "/nowhere", {**PREFLIGHT, "access-control-request-headers": wanted})
    assert (other.status, cors_headers(other)) == (204, cors_headers(answer))


def test_a_preflight_names_the_usual_headers_and_echoes_no_nonsense() -> None:
    ask = Asked(cors_origin=[PAGE])
    for wanted in ("", "a b", "x\x0b: y", "a,,b"):
        answer = ask("OPTIONS", "/ask", {**PREFLIGHT, "access-control-request-headers": wanted})
        allowed = answer.headers["access-control-allow-headers"]
        assert allowed == "authorization, content-type, x-api-key"
    private = {**PREFLIGHT, "access-control-request-private-network": "true"}
    answer = ask("OPTIONS", "/ask", private)
    assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("key", [{}, {"api_key": "secret"}])
@pytest.mark.parametrize("origins", [[], ["https://app.example:444", "http://app.example"]])
def test_a_preflight_of_another_page_is_refused(origins: list[str], key: dict[str, str]) -> None:
    answer = Asked(cors_origin=origins, **key)("OPTIONS", "/ask", PREFLIGHT)
    assert answer.status == 403
    assert f"--cors-origin {PAGE}" in answer.error["remedy"]
    assert not cors_headers(answer)


def test_options_that_is_no_preflight_is_a_method_like_others() -> None:
    answer = Asked(cors_origin=[PAGE])("OPTIONS", "/ask")
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "status"), [("/good", 200), ("/bad", 400), ("/nowhere", 404), ("/stream", 200)]
)
def test_every_answer_to_an_allowed_page_can_be_read_by_it(path: str, status: int) -> None:
    answer = Asked(cors_origin=[PAGE])("GET", path, {"origin": PAGE})
    assert answer.status == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-expose-headers"] == "*"
    assert answer.headers["vary"] == "Origin"


def test_so_can_a_refusal_for_want_of_a_key() -> None:
    answer = Asked(cors_origin=[PAGE], api_key="secret")("GET", "/good", {"origin": PAGE})
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_any_origin() -> None:
    ask = Asked(cors_origin=["*"])
    for origin in (PAGE, "null", "chrome-extension://abc"):
        answer = ask("POST", "/ask", {"origin": origin, "content-type": "application/json"}, b"{}")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers
    assert ask("OPTIONS", "/ask", PREFLIGHT).headers["access-control-allow-origin"] == "*"


def test_with_a_key_other_pages_get_an_answer_that_they_cannot_read() -> None:
    headers = {"origin": "https://evil.example", "authorization": "Bearer secret"}
    for origins in ([], [PAGE]):
        answer = Asked(cors_origin=origins, api_key="secret")("GET", "/good", headers)
        assert answer.status == 200
        assert not cors_headers(answer)


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "localhost:8000", 200),  # a program
        ("http://localhost:8000", "localhost:8000", 200),  # the server's own
        ("http://127.0.0.1", "127.0.0.1", 200),
        ("https://127.0.0.1", "127.0.0.1", 200),  # behind a proxy that speaks TLS
        ("http://localhost:3000", "localhost:8000", 403),
        ("http://localhost", "localhost:8000", 403),
        ("https://evil.example", "localhost:8000", 403),
        ("null", "localhost:8000", 403),  # a sandboxed frame, a file
        ("", "localhost:8000", 403),
        ("http://", "", 403),
        ("http://localhost:8000.evil.example", "localhost:8000", 403),
        ("http://localhost:8000, https://evil.example", "localhost:8000", 403),
    ],
)
def test_without_a_key_other_pages_are_refused(origin: str | None, host: str, status: int) -> None:
    headers = {"host": host, "content-type": "application/json"}
    headers |= {} if origin is None else {"origin": origin}
    answer = Asked()("POST", "/ask", headers, b"{}")
    assert answer.status == status
    assert not cors_headers(answer)
    if status == 403:
        assert "--cors-origin" in answer.error["remedy"]


# -- Host ------------------------------------------------------------------------------------------

NEVER = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "a, b",
    "0x7f.1",
    *("a.b", "a b", "evil.example:8000", "internal.example"),
]
ALWAYS = [
    *("localhost", "LOCALHOST:8000", "localhost.:1", "app.localhost", "127.0.0.1", "10.2.3.4:8000"),
    *("[::1]:8000", "[fe80::1]", "host.docker.internal:8000", ""),
]
NETWORK = ["headrace:8000", "box", "box.local", "box.home.arpa"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "0.0.0.0", "::"])
def test_hosts_without_a_key(bound: str) -> None:
    ask = Asked(host=bound)
    is_local = bound in ("127.0.0.1", "localhost")
    for names, status in ((NEVER, 403), (ALWAYS, 200), (NETWORK, 403 if is_local else 200)):
        for name in names:
            assert ask("GET", "/good", {"host": name}).status == status, name


def test_the_machines_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box.corp.example")
    assert Asked(host="0.0.0.0")("GET", "/good", {"host": "box.corp.example:80"}).status == 200
    assert Asked()("GET", "/good", {"host": "box.corp.example:80"}).status == 403


def test_a_refused_host_is_told_what_to_do() -> None:
    answer = Asked()("GET", "/good", {"host": "llm.example.com:8000"})
    assert answer.status == 403
    assert "--allowed-host llm.example.com," in answer.error["remedy"]
    odd = Asked()("GET", "/good", {"host": "$(reboot)"})
    assert "--allowed-host NAME" in odd.error["remedy"]


def test_hosts_that_are_allowed() -> None:
    ask = Asked(allowed_host=["LLM.example.com", "*.corp.example"])
    for name, status in {
        "llm.example.com:8000": 200,
        "a.b.corp.example": 200,
        "corp.example": 403,
        "evilcorp.example": 403,
        "other.example.com": 403,
    }.items():
        assert ask("GET", "/good", {"host": name}).status == status, name
    assert Asked(allowed_host=["*"])("GET", "/good", {"host": "evil.example"}).status == 200


def test_any_host_will_do_with_a_key_and_for_probes() -> None:
    keyed = Asked(api_key="secret")
    headers = {"host": "evil.example", "authorization": "Bearer secret"}
    assert keyed("GET", "/good", headers).status == 200
    assert Asked()("GET", "/health", {"host": "lb.example", "origin": "null"}).status == 200


def test_rebinding_looks_like_the_servers_own_page_and_is_refused() -> None:
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    answer = Asked()("POST", "/ask", {**headers, "content-type": "application/json"}, b"{}")
    assert answer.status == 403
    assert "Host" in answer.error["message"]


# -- Content-Type ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [{}, {"api_key": "secret"}])
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("text/plain", 415),  # these three a page may send without asking
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/json", 415),
        ("application/jsonp", 415),
        ("application/json, text/plain", 415),
        ("", 415),
        ("???", 415),
    ],
)
def test_a_body_must_be_called_json(
    content_type: str | None, status: int, key: dict[str, str]
) -> None:
    headers = {"authorization": "Bearer secret"}
    headers |= {} if content_type is None else {"content-type": content_type}
    answer = Asked(**key)("POST", "/ask", headers, b"{}")
    assert answer.status == status
    if status == 415:
        assert "Content-Type: application/json" in answer.error["remedy"]


def test_a_browser_must_always_call_it_something() -> None:
    """A Blob without a type comes without one, and without a preflight."""
    own = {"origin": "http://localhost:8000"}
    assert Asked()("POST", "/ask", own, b"{}").status == 415
    assert Asked()("POST", "/ask", {"sec-fetch-site": "same-origin"}, b"{}").status == 415
    # Nothing was sent: what is wrong with that, the endpoint says.
    assert Asked()("POST", "/ask", {**own, "content-type": "text/plain"}).status == 200


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cors_origin", "app.example"),
        ("cors_origin", "null"),
        ("cors_origin", "https://app.example/path"),
        ("cors_origin", "https://*.example"),
        ("allowed_host", "http://a.example"),
        ("allowed_host", "a.example:8000"),
        ("allowed_host", "a*.example"),
        ("allowed_host", ""),
    ],
)
def test_what_is_no_origin_or_no_host_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="such as") as caught:
        ServerConfig(**cast("Any", {name: [value]}))
    assert caught.value.param == name


def test_origins_are_written_as_browsers_write_them() -> None:
    given = ["https://App.example:443/", "http://a:80", "http://a:443", "tauri://localhost"]
    wanted = ("https://app.example", "http://a", "http://a:443", "tauri://localhost")
    assert ServerConfig(cors_origin=tuple(given)).cors_origin == wanted


def test_lists_come_from_everywhere() -> None:
    two = ("http://a", "http://b")
    file = SettingsFile(name="f", values={"server": {"cors_origin": list(two)}})
    assert resolve_settings({}, {}, file).server.cors_origin == two
    variables = {"HEADRACE_CORS_ORIGIN": "http://a, http://b"}
    assert resolve_settings({}, variables).server.cors_origin == two
    found = resolve_settings({"cors_origin": ("http://c",)}, variables, file)
    assert found.server.cors_origin == ("http://c",)
    assert found.facts()["cors_origin"] == {"value": ["http://c"], "origin": "--cors-origin"}
    wrong = SettingsFile(name="f", values={"server": {"cors_origin": ["http://a", 5]}})
    with pytest.raises(ConfigError, match="a list of texts"):
        resolve_settings({}, {}, wrong)


def test_any_page_and_no_key_is_worth_a_word() -> None:
    config = ServerConfig(cors_origin=("*",))
    assert browser_warnings(config, has_keys=False)
    assert not browser_warnings(config, has_keys=True)
    assert not browser_warnings(ServerConfig(cors_origin=(PAGE,)), has_keys=False)


# -- a real server, a real browser -----------------------------------------------------------------


class _Pages(http.server.BaseHTTPRequestHandler):
    """Serves one page, and takes what it found out."""

    page: bytes = b""
    reports: list[dict[str, Any]]
    reported: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(self.page)

    def do_POST(self) -> None:
        self.reports.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()
        self.reported.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Site:
    """A web site of this machine, on a port of its own."""

    def __init__(self) -> None:
        self.handler: Any = type("Pages", (_Pages,), {"reports": [], "reported": threading.Event()})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def test_a_real_server_answers_preflights_and_streams(start_server: StartServer) -> None:
    server = start_server(server={"cors_origin": [PAGE, "http://other:1"]})
    ask = f"origin: {PAGE}\r\naccess-control-request-method: POST\r\n"
    with RawClient(server.port) as client:
        client.send(f"OPTIONS {CHAT} HTTP/1.1\r\nhost: localhost\r\n{ask}\r\n")
        answer = client.answer("OPTIONS")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, PAGE)
        body = json.dumps({**json.loads(GOOD), "stream": True})
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\norigin: {PAGE}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        streamed = client.send(head, body).answer()  # the same connection: it stayed good
    assert streamed.status == 200
    assert streamed.headers["access-control-allow-origin"] == PAGE
    assert streamed.body.endswith(b"data: [DONE]\n\n")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
TRY = """<script>
const url = %s;
const chat = JSON.stringify({messages: [{role: "user", content: "Hi"}], max_tokens: 1});
async function attempt(options) {
  try {
    const answer = await fetch(url + "/v1/chat/completions", {method: "POST", ...options});
    const id = answer.headers.get("x-request-id");
    return {status: answer.status, id, text: await answer.text()};
  } catch (error) { return {failed: String(error)}; }
}
(async () => {
  const json = {"content-type": "application/json", "authorization": "Bearer x"};
  const found = {
    json: await attempt({body: chat, headers: json}),
    simple: await attempt({body: chat}),
    blind: await attempt({body: chat, mode: "no-cors"}),
    blob: await attempt({body: new Blob([chat]), mode: "no-cors"}),
  };
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium on the PATH: apt-get install chromium")
def test_a_real_browser(start_server: StartServer, site: Site, tmp_path: Path) -> None:
    closed, opened = start_server(), start_server(server={"cors_origin": [site.origin]})
    seen = {}
    for name, server in (("closed", closed), ("opened", opened)):
        site.handler.page = (TRY % json.dumps(server.base_url)).encode()
        site.handler.reported.clear()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        folder = f"--user-data-dir={tmp_path / name}"
        with subprocess.Popen(
            [CHROMIUM, *flags, folder, "--remote-debugging-port=0", site.origin],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as browser:
            try:
                assert site.handler.reported.wait(120), "the page reported nothing"
            finally:
                browser.terminate()
        seen[name] = site.handler.reports[-1]
    # Not allowed: nothing can be read, and nothing was done for those that need not be read.
    assert all("failed" in seen["closed"][how] for how in ("json", "simple"))
    assert tokens_generated(closed) == 0
    # Allowed: an answer with an id that the page may read; but as JSON only.
    assert seen["opened"]["json"]["status"] == 200
    assert seen["opened"]["json"]["id"]
    assert "choices" in json.loads(seen["opened"]["json"]["text"])
    assert seen["opened"]["simple"]["status"] == 415
    assert "Content-Type" in seen["opened"]["simple"]["text"]
    assert tokens_generated(opened) == 1


def tokens_generated(server: RunningServer) -> float:
    with RawClient(server.port) as client:
        client.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        lines = client.answer().body.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("headrace:generation_tokens_total")]
    return float(line.split()[-1])

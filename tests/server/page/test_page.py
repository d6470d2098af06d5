"""The page in Chromium: every view works, nothing is complained about, nothing is kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import RunningServer, StartServer
from tests.server.page.browser import Browser, chromium, find_chromium

from headrace.server.api.page.endpoint import SCRIPTS, made

VIEWS = ("live", "chat", "doctor", "memory", "settings")


def test_the_document_is_whole_and_loads_nothing() -> None:
    document, policy = made()
    text = document.decode()
    assert "/* style */" not in text
    assert "/* script */" not in text
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text) == []
    assert "innerHTML" not in text
    assert "eval(" not in text
    assert "'unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    folder = Path(__file__).parents[3] / "src/headrace/server/api/page"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)


def test_the_page_is_open_and_its_headers_are_strict(server: RunningServer) -> None:
    reply = httpx.get(server.base_url)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == made()[1]
    assert reply.headers["x-frame-options"] == "DENY"
    assert httpx.post(server.base_url, json={}).status_code == 405


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    with chromium(found, tmp_path_factory.mktemp("browser")) as made_one:
        yield made_one


@pytest.fixture(scope="module")
def keyed(start_server: StartServer) -> RunningServer:
    return start_server(server={"api_key": "own-key", "slo": "ttft=1ms,tpot=10s"})


def test_live_numbers_are_drawn(browser: Browser, server: RunningServer) -> None:
    browser.open(server.base_url)
    browser.until("document.getElementById('state-text').textContent === 'serving'")
    body = {"model": "smollm2", "prompt": "A river is", "max_tokens": 20, "ignore_eos": True}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body).status_code == 200
    # Lines need two samples; throughput is the first chart.
    browser.until("document.querySelectorAll('#charts svg')[0].querySelectorAll('path').length > 0")
    browser.until("/[1-9]/.test(document.querySelector('#tiles dl:nth-child(7) dd').textContent)")
    label = browser.run("return document.getElementById('blocks').getAttribute('aria-label')")
    assert re.fullmatch(r"KV blocks: \d+ used by sequences, \d+ cached prefixes, \d+ free", label)
    assert browser.complaints() == []


def test_every_view_opens_by_keyboard_and_fits_a_phone(
    browser: Browser, server: RunningServer
) -> None:
    browser.open(server.base_url)
    try:
        for width in (1280, 390):
            browser.resize(width, 844)
            for view in VIEWS[1:] + VIEWS[:1]:
                browser.type("[aria-selected=true]", "\ue014")  # the right arrow
                browser.until(
                    "!document.getElementById(arguments[0]).hidden && document.activeElement.id"
                    " === 'tab-' + arguments[0]",
                    view,
                )
                wide = browser.run(
                    "return document.documentElement.scrollWidth <= window.innerWidth"
                )
                assert wide, (view, width)
    finally:
        browser.resize(1280, 900)
    assert browser.complaints() == []


def test_a_screen_reader_has_a_name_for_everything(browser: Browser, server: RunningServer) -> None:
    browser.open(server.base_url)
    browser.until("document.getElementById('state-text').textContent === 'serving'")
    named = {"button", "checkbox", "combobox", "image", "log", "meter", "spinbutton", "tab",
             "tablist", "tabpanel", "textbox"}  # fmt: skip
    seen = set()
    for view in VIEWS:
        browser.click(f"#tab-{view}")
        if view == "memory":
            browser.until("document.querySelector('#ledger meter')")
        tree = browser.readers_tree()
        assert [each for each in tree if each[0] in named and not each[1].strip()] == [], view
        seen |= {role for role, _ in tree}
        if view == "live":
            pictures = [name for role, name in tree if role == "image"]
            assert any(name.startswith("Throughput, now: generated ") for name in pictures)
            # A reader who moves inside a chart hears the sample, and nobody hears every second.
            browser.type("#charts svg", "\ue012")  # the left arrow
            browser.until("/^at .*: generated/.test(document.getElementById('said').textContent)")
            assert browser.run("return document.querySelectorAll('#live [aria-live]').length") == 0
    assert named <= seen


def test_axe_finds_nothing(browser: Browser, server: RunningServer) -> None:
    axe = Path(os.environ.get("AXE_CORE", "axe.min.js"))
    if not axe.is_file():
        pytest.skip("AXE_CORE names no axe.min.js: npm pack axe-core")
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    script = (
        axe.read_text() + "; axe.run(document, {runOnly: arguments[0]}).then("
        "(found) => arguments[1](found.violations.map((each) => [each.id, each.nodes[0].html])))"
    )
    browser.open(server.base_url)
    for theme in ("light", "dark"):
        browser.prefer(theme)
        for view in VIEWS:
            browser.click(f"#tab-{view}")
            assert browser.run_async(script, rules) == [], (theme, view)


def test_any_public_model_can_be_fitted(browser: Browser, server: RunningServer) -> None:
    browser.open(f"{server.base_url}/#/memory")
    browser.run("location.reload()")
    answer = "document.getElementById('fit-answer').textContent"
    browser.until(f"{answer}.startsWith('It ')")  # the loaded one
    browser.until("document.querySelectorAll('#fit-model option').length > 100")
    choose = """for (const [id, value] of Object.entries(arguments[0])) {
        document.getElementById(id).value = value;
        document.getElementById(id).dispatchEvent(new Event('input'));
    }"""
    asked = {"fit-model": "meta-llama/Meta-Llama-3.1-8B", "fit-gpu": "l40s", "fit-tokens": "8192",
             "fit-sequences": "16"}  # fmt: skip
    browser.run(choose, asked)
    browser.until(f"{answer} === 'It fits on l40s: 7.91 GiB are left.'")  # docs/fit.md
    assert browser.run("return document.getElementById('fit-memory').closest('label').hidden")
    browser.run(choose, {"fit-sequences": "64"})
    browser.until(f"{answer}.startsWith('It does not fit on l40s')")
    browser.until("/--concurrency 23/.test(document.getElementById('fit-changes').textContent)")
    browser.run(choose, {"fit-model": ""})
    browser.until(f"{answer}.startsWith('It')")
    assert not browser.run("return document.getElementById('fit-memory').closest('label').hidden")
    assert browser.complaints() == []


def test_a_chat_streams_compares_and_is_not_kept(browser: Browser, server: RunningServer) -> None:
    browser.open(f"{server.base_url}/#/chat")
    browser.run("location.reload()")
    browser.click("#compare")
    for lane, tokens in ((1, "5"), (2, "9")):
        browser.click(f".lane:nth-child({lane}) summary")
        browser.type(f".lane:nth-child({lane}) [data-field=max_tokens]", tokens)
        browser.type(f".lane:nth-child({lane}) [data-field=temperature]", "0")
    browser.type("#message", "Name a river in a zebra-striped sentence.")
    browser.click("#send")
    browser.until("document.querySelectorAll('.times').length === 2")
    times = browser.run("return [...document.querySelectorAll('.times')].map(e => e.textContent)")
    assert "5 tokens" in times[0]
    assert "9 tokens" in times[1]
    assert all("first token after" in each for each in times)
    kept = "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    assert "zebra" not in browser.run(kept)
    assert "zebra" not in server.log
    assert browser.complaints() == []


def test_the_stop_button_ends_an_answer(browser: Browser, server: RunningServer) -> None:
    browser.open(f"{server.base_url}/#/chat")
    browser.run("location.reload()")
    browser.type("#message", "Count from one to ten thousand.")
    browser.click("#send")
    browser.until("document.querySelector('.turn.assistant').textContent.length > 0")
    browser.click("#stop")
    browser.until("/stopped/.test(document.querySelector('.times')?.textContent)")
    server.wait_for(
        lambda: httpx.get(f"{server.base_url}/load").json()["server_load"] == 0
    )  # the engine's part has ended too


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("**b** and `c`", "<p><strong>b</strong> and <code>c</code></p>"),
        ("# T\n- x\n- y", "<h3>T</h3><ul><li>x</li><li>y</li></ul>"),
        ("- x\n  - y\n- z", "<ul><li>x<ul><li>y</li></ul></li><li>z</li></ul>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("```\n<b>\n```", '<pre tabindex="0"><code>&lt;b&gt;</code></pre>'),
    ],
)
def test_what_a_model_writes_is_shown_and_never_run(
    browser: Browser, text: str, wanted: str
) -> None:
    folder = Path(__file__).parents[3] / "src/headrace/server/api/page"
    script = "".join((folder / name).read_text() for name in ("ask.js", "markdown.js"))
    shown = browser.run(
        script + "; const box = document.createElement('div');"
        "box.append(...markdown(arguments[0])); return box.innerHTML",
        text,
    )
    assert shown == wanted


def test_with_keys_the_page_asks_for_one_and_keeps_it_for_the_tab(
    browser: Browser, keyed: RunningServer
) -> None:
    browser.open(keyed.base_url)
    browser.until("document.getElementById('keys').open")
    assert (
        browser.run("return document.getElementById('charts').querySelectorAll('path').length") == 0
    )
    browser.type("#key-api", "wrong")
    browser.click("#keys-form button[type=submit]")
    browser.until("document.getElementById('keys').open")
    browser.run("document.getElementById('key-api').value = ''")
    browser.type("#key-api", "own-key")
    browser.click("#keys-form button[type=submit]")
    browser.until("document.getElementById('state-text').textContent === 'serving'")
    browser.run("location.reload()")
    browser.until("document.getElementById('state-text').textContent === 'serving'")
    assert "own-key" not in browser.run("return JSON.stringify({...localStorage})")
    allowed = [each for each in browser.complaints() if "401" not in each]
    assert allowed == []
    browser.click("#tab-settings")
    browser.until("/--slo/.test(document.getElementById('config').textContent)")
    assert "own-key" not in browser.text("#config")
    browser.click("#tab-memory")
    browser.until("/fit/.test(document.getElementById('fit-answer').textContent)")
    browser.click("#tab-doctor")
    browser.until("document.getElementById('findings').children.length > 0")
    assert browser.complaints() == []


def test_dark_and_light(browser: Browser, server: RunningServer) -> None:
    def ground() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    browser.open(server.base_url)
    browser.prefer("light")
    light = ground()
    browser.prefer("dark")
    dark = ground()
    assert light != dark
    browser.click("#theme")
    assert ground() == light
    browser.run("localStorage.clear(); delete document.documentElement.dataset.theme")
    assert ground() == dark

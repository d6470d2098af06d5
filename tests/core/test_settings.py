"""Settings out of flags, variables and a file: which wins, where it came from, what is refused."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.modes import PRESETS, Mode
from headrace.core.server_config import ServerConfig
from headrace.core.settings import (
    DEFAULT,
    Setting,
    SettingsFile,
    all_settings,
    resolve_settings,
)
from headrace.core.settings_file import find_file, read_settings_file

SETTINGS = {setting.name: setting for setting in all_settings()}
POOL = ("kv_memory", "kv_tokens", "kv_fraction")


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that the config takes, as flags and files have them."""
    if setting.choices is not None:
        return st.sampled_from([str(choice) for choice in setting.choices])
    if setting.is_bool:
        return st.booleans()
    if setting.name == "gpu_memory":
        return st.sampled_from(["0.5", "1", "60GiB", "70000 MiB"])
    if setting.name == "speculate":
        return st.sampled_from(["auto", "ngram", "draft:a/b", "synthetic:0.5"])
    if setting.is_list:
        items = {
            "cors_origin": ["http://a", "https://b.example:1", "*"],
            "allowed_host": ["a", "*.b.example", "*"],
        }
        return st.lists(st.sampled_from(items[setting.name]), min_size=1)
    kind = str(setting.kind)
    if "float" in kind:
        return st.floats(1.0 if setting.name == "max_step_growth" else 0.25, 1000.0)
    if "int | str" in kind:
        # 64 KiB is the most that a schema may have.
        return st.one_of(st.integers(1, 1 << 16), st.sampled_from(["0.5KiB", "64 KiB", "64KiB"]))
    if setting.name == "admin_port":
        return st.integers(17, 32)  # another one than `port`
    if "int" in kind:
        return st.integers(1, 16)  # within every field's range
    return st.text("abcdefgh0123456789:/._-", min_size=1, max_size=20)


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A file's, the variables' and the flags' share, each some of the settings."""
    # These do not go with some values of others.
    names = [name for name in SETTINGS if name not in (*POOL, "prefix_disk", "role")]
    shares = []
    for _ in range(3):
        chosen = draw(st.sets(st.sampled_from(names)))
        share = {name: draw(values_of(SETTINGS[name])) for name in sorted(chosen)}
        if pool := draw(st.sampled_from([None, *POOL])):  # at most one of them in one place
            share[pool] = {"kv_memory": "3GiB", "kv_tokens": 777, "kv_fraction": 0.25}[pool]
        shares.append(share)
    return shares


def as_file(share: dict[str, Any]) -> SettingsFile:
    tables: dict[str, Any] = {}
    for name, value in share.items():
        table = SETTINGS[name].table
        (tables.setdefault(table, {}) if table else tables)[name] = value
    return SettingsFile(name="headrace.toml", values=tables)


def as_variables(share: dict[str, Any]) -> dict[str, str]:
    """As a shell would have them."""
    return {f"HEADRACE_{name.upper()}": _written(value) for name, value in share.items()}


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(sources())
def test_a_flag_wins_over_a_variable_and_that_over_the_file(shares: list[dict[str, Any]]) -> None:
    file, variables, flags = shares
    found = resolve_settings(flags, as_variables(variables), as_file(file))
    configs = {"server": ServerConfig, "engine": EngineConfig}
    pool = next((n for share in (flags, variables, file) for n in POOL if n in share), None)
    mode = next((share["mode"] for share in (flags, variables, file) if "mode" in share), None)
    preset = {} if mode is None else PRESETS[Mode(mode)]
    for name, setting in SETTINGS.items():
        holders = [
            (flags, "--" + name.replace("_", "-")),
            (variables, "HEADRACE_" + name.upper()),
            (file, "headrace.toml"),
            (preset, f"mode {mode}"),
        ]
        value, origin = setting.default, DEFAULT
        if name not in POOL or name == pool:
            value, origin = next(
                ((share[name], place) for share, place in holders if name in share),
                (setting.default, DEFAULT),
            )
        assert found.origins[name] == origin
        if setting.table:  # a config has its own ways with sizes and names: compare in its terms
            value = getattr(configs[setting.table](**{name: value}), name)
        assert found.value(setting) == value
        if setting.choices is not None and value is not None:
            assert isinstance(found.value(setting), StrEnum)


def test_names_are_said_once() -> None:
    """A variable has no table: two settings of one name could not be told apart."""
    assert len(SETTINGS) == len(all_settings())


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("True", True), ("on", True), ("YES", True), ("0", False), ("off", False)],
)
def test_yes_and_no_in_a_variable(text: str, value: bool) -> None:
    found = resolve_settings({}, {"HEADRACE_LOG_CONTENT": text})
    assert found.server.log_content is value


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HEADRACE_PROT": "1"}, "Unknown variable HEADRACE_PROT. Did you mean HEADRACE_PORT?"),
        ({"HEADRACE_CAHCE": "1"}, "Unknown variable HEADRACE_CAHCE. Did you mean HEADRACE_CACHE?"),
        ({"HEADRACE_ZZZZZZZZ": "1"}, "Unknown variable HEADRACE_ZZZZZZZZ. Unset it."),
        ({"HEADRACE_PORT": "80a"}, "port is '80a'; expected a whole number (set by HEADRACE_PORT)"),
        ({"HEADRACE_PORT": "99999"}, "port is 99999; expected 0 to 65535 (set by HEA"),
        ({"HEADRACE_PORT": ""}, "HEADRACE_PORT is empty; expected a whole number"),
        ({"HEADRACE_API_KEY": ""}, "HEADRACE_API_KEY is empty; expected some text"),
        ({"HEADRACE_TRACE": "maybe"}, "trace is 'maybe'; expected true or false (set by HEADRACE"),
        ({"HEADRACE_TIMEOUT_S": "soon"}, "timeout_s is 'soon'; expected a number (set by HEADRACE"),
        ({"HEADRACE_TIMEOUT_S": "nan"}, "timeout_s is nan; expected a finite number above 0 ("),
        ({"HEADRACE_KV_DTYPE": "f8"}, "kv_dtype is 'f8'; expected one of f32, f16, bf16, int8"),
        ({"HEADRACE_MAX_BODY": "much"}, "max_body is 'much'; expected a number of bytes, or a nu"),
        (
            {"HEADRACE_DEVICE": "tpu"},
            "device is 'tpu'; expected one of auto, cpu, cuda, reference",
        ),
        (
            {"HEADRACE_BACKEND": "reference"},
            "'HEADRACE_BACKEND=reference' is now 'HEADRACE_DEVICE=reference'. Use the new name.",
        ),
        ({"HEADRACE_BACKEND": "tpu"}, "one of auto, cpu, cuda, reference. Write 'HEADRACE_DEVICE="),
        (
            {"HEADRACE_KV_TOKENS": "5", "HEADRACE_KV_MEMORY": "1GiB"},
            "kv_memory and kv_tokens are given; expected at most one of kv_memory, kv_tokens and "
            "kv_fraction: each sets the size of the KV pool (set by HEADRACE_KV_MEMORY and HEADRA",
        ),
    ],
)
def test_variables_that_are_refused(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, variables)
    assert expected in str(error.value)
    assert error.value.remedy


def test_variables_that_are_for_others() -> None:
    ours = {"HEADRACE_CACHE": "/x", "HEADRACE_OFFLINE": "1", "HEADRACE_DEBUG": "1"}
    # What Kubernetes puts into every container beside a Service that is named "headrace".
    links = {
        "HEADRACE_SERVICE_HOST": "10.0.0.7",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_HTTP": "8000",
        "HEADRACE_PORT": "tcp://10.0.0.7:8000",
        "HEADRACE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.7",
        "HEADRACE_PORT_8000_TCP_PROTO": "tcp",
    }
    found = resolve_settings({}, {**ours, **links, "HEADRACE_TEST_X": "1", "PATH": "/bin"})
    assert found.server == ServerConfig()
    assert set(found.origins.values()) == {DEFAULT}


def write(folder: Path, text: str) -> SettingsFile:
    path = folder / "headrace.toml"
    path.write_text(text)
    return read_settings_file(path)


GOOD = """\
model = "smollm2"   # by its name

[server]
port = 9000
max_body = "1MiB"
timeout_s = 5

[engine]
prefix_cache = false
kv_dtype = "int8"
"""


def test_a_file_and_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = resolve_settings({}, {}, write(tmp_path, GOOD))
    assert (found.model, found.engine.device) == ("smollm2", "auto")
    assert (found.server.port, found.server.max_body, found.server.timeout_s) == (9000, 1 << 20, 5)
    assert found.engine.prefix_cache is False
    assert found.origins["model"] == "headrace.toml:1"
    assert found.origins["port"] == "headrace.toml:4"
    assert found.origins["kv_dtype"] == "headrace.toml:10"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "prot = 1",
            "headrace.toml:1: unknown setting 'prot' at the top of the file. Did",
        ),
        ("port = 1", ":1: unknown setting 'port' at the top of the file. It belongs to [server]."),
        ("[engine]\nport = 1", ":2: unknown setting 'port' in [engine]. It belongs to [server]."),
        ("[server]\nmodel = ''", ":2: unknown setting 'model' in [server]. It belongs to the top"),
        ("[sevrer]\nport = 1", ":1: unknown setting 'sevrer' at the top of the file. Did you mean"),
        (
            "[server]\n\nport = '80'",
            "port is '80'; expected a whole number (set by headrace.toml:3",
        ),
        ("[server]\nport = true", "port is True; expected a whole number (set by headrace.toml:2)"),
        ("[server]\nport = 1.5", "port is 1.5; expected a whole number"),
        ("[server]\ntrace = 1", "trace is 1; expected true or false"),
        ("[server]\nmax_n = 0", "max_n is 0; expected 1 to 64 (set by headra"),
        ("[engine]\nthreads = 0", "threads is 0; expected 1 or more (set by headrace.toml:2)"),
        ("[engine]\nkv_memory = [1]", "kv_memory is [1]; expected a number of bytes, or a size"),
        (
            "model = 'x'\nbackend = 'reference'",
            "headrace.toml:2: \"backend = 'reference'\" is now \"device = 'reference'\". Use the "
            "new name. It belongs to [engine].",
        ),
        ("[engine]\nbackend = 'cpu'", ":2: \"backend = 'cpu'\" is now \"device = 'cpu'\"."),
        ("backend = 3", ":1: 'backend = 3': this setting is now 'device', one of auto, cpu, cuda"),
        ("server = 5", "headrace.toml:1: server is 5; expected a table"),
        ("[server", "is not TOML"),
        ("a = 1\na = 2", "is not TOML"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, {}, write(tmp_path, text))
    assert expected in str(error.value)
    assert error.value.remedy


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_settings_file(tmp_path / "none.toml")
    (tmp_path / "latin").write_bytes(b"model = '\xe9'")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_settings_file(tmp_path / "latin")
    (tmp_path / "huge").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_settings_file(tmp_path / "huge")


def test_which_file(tmp_path: Path) -> None:
    here, home, xdg = (tmp_path / name for name in ("here", "home", "xdg"))
    own, users = home / ".config/headrace/headrace.toml", xdg / "headrace/headrace.toml"
    for path in (here / "headrace.toml", own, users):
        path.parent.mkdir(parents=True)
    variables = {"HOME": str(home)}
    assert find_file(None, here, variables) is None
    own.touch()
    assert find_file(None, here, variables) == own
    variables["XDG_CONFIG_HOME"] = str(xdg)
    assert find_file(None, here, variables) is None  # the specification: instead, not besides
    users.touch()
    assert find_file(None, here, variables) == users
    assert find_file(None, here, {**variables, "XDG_CONFIG_HOME": "relative"}) == own
    (here / "headrace.toml").touch()
    assert find_file(None, here, variables) == here / "headrace.toml"
    assert find_file(tmp_path / "other", here, variables) == tmp_path / "other"


def test_a_key_is_shown_nowhere(tmp_path: Path) -> None:
    secret = "s3cret-key"
    found = resolve_settings({"api_key": secret}, {})
    assert found.server.api_key == secret
    assert found.facts()["api_key"] == {"value": "***", "origin": "--api-key"}
    assert secret not in str(found.facts())
    assert secret not in repr(found.server)
    assert secret not in repr(found)
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, {}, write(tmp_path, f"[server]\napi_key = ['{secret}']"))
    assert secret not in str(error.value)

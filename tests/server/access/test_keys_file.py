"""The keys file: what it may say, and who else may read or write it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.core.errors import (
    ConfigError,
)
from headrace.core.server_config import ServerConfig
from headrace.server.access.keys_file import read_keys, read_keys_file


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"two").hexdigest()
    path = write(
        tmp_path,
        f"""
        [[keys]]
        name = "a"
        key = "one"
        requests_per_minute = 5
        [[keys]]
        name = "b"
        key_sha256 = "{digest}"
        tokens_per_minute = 100
        max_concurrent = 2
        weight = 3
        """,
    )
    config = ServerConfig(api_keys_file=str(path), api_key="three")
    keys, warnings = read_keys(config)
    sent = {"one": "a", "two": "b", "three": "default"}
    for text, name in sent.items():
        assert keys.authenticate({"authorization": f"Bearer {text}"}) == name
    assert warnings == []
    assert read_keys_file(path)[1].max_concurrent == 2
    assert keys.weights == {"default": 1, "a": 1, "b": 3}


def test_a_file_that_all_can_read_is_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=0o644)
    _, warnings = read_keys(ServerConfig(api_keys_file=str(path)))
    assert [str(path) in warning for warning in warnings] == [True]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (0o600, []),
        (0o640, []),
        (0o644, ["read"]),
        (0o660, ["its group"]),
        (0o664, ["its group", "read"]),
    ],
)
def test_who_else_may_read_or_write_the_file_is_warned_of(
    tmp_path: Path, mode: int, says: list[str]
) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=mode)
    _, warnings = read_keys(ServerConfig(api_keys_file=str(path)))
    assert len(warnings) == len(says)
    assert all(each in warning for each, warning in zip(says, warnings, strict=True))


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_a_file_that_all_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, '[[keys]]\nname = "a"\nkey = "x"', mode=mode)
    with pytest.raises(ConfigError, match="written to by every user") as error:
        read_keys(ServerConfig(api_keys_file=str(path)))
    assert "chmod 600" in error.value.remedy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no [[keys]]"),
        ("keys = 3", "no [[keys]]"),
        ("keys = [3]", "expected only tables"),
        ("[[keys]", "not TOML"),
        ('title = "x"\n[[keys]]\nname = "a"\nkey = "x"', "'title'"),
        ('[[keys]]\nkey = "x"', "no name"),
        ('[[keys]]\nname = "a"', "no key"),
        (f'[[keys]]\nname = "a"\nkey = "x"\nkey_sha256 = "{"0" * 64}"', "both"),
        ('[[keys]]\nname = "a"\nkey_sha256 = "abc"', "64 hexadecimal"),
        ('[[keys]]\nname = "a"\nkey = 3', "not text"),
        ('[[keys]]\nname = "a"\nkey = "x"\nrequests = 3', "'requests'"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrent = 0', "max_concurrent = 0"),
        ('[[keys]]\nname = "a"\nkey = "x"\nmax_concurrent = true', "max_concurrent = True"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 0', "weight = 0"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 1.5', "weight = 1.5"),
        ('[[keys]]\nname = "a"\nkey = "x"\nweight = 1001', "1 to 1000"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "a"\nkey = "y"', "twice"),
        ('[[keys]]\nname = "a"\nkey = "x"\n[[keys]]\nname = "b"\nkey = "x"', "twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_keys(ServerConfig(api_keys_file=str(path)))
    assert says in error.value.cause
    assert error.value.param == "api_keys_file"


def test_no_file_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(ServerConfig(api_keys_file=str(tmp_path / "nothing")))

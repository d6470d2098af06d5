"""API prices: every one dated and sourced, found by name, and replaced by one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import (
    OWN,
    ApiPrice,
    all_apis,
    find_api,
    parse_api,
    read_api_prices,
)


@pytest.mark.parametrize("api", all_apis(), ids=lambda api: api.name)
def test_each_is_dated_sourced_and_plausible(api: ApiPrice) -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", api.date)
    assert " at " in api.source  # a repository at a commit
    assert api.title
    assert 0 < api.input_usd <= api.output_usd <= 100
    if api.cached_input_usd is not None:
        assert 0 < api.cached_input_usd <= api.input_usd
    for name in (api.name, api.name.upper(), *api.aliases):
        assert find_api(name) is api


def test_the_makers_and_hosts_that_were_asked_for_are_there() -> None:
    titles = " ".join(api.title for api in all_apis())
    for word in ("OpenAI", "Anthropic", "Google", "DeepSeek", "Llama 3.3 70B", "Llama 3.1 8B",
                 "Qwen"):  # fmt: skip
        assert word in titles
    names = [name for api in all_apis() for name in (api.name, *api.aliases)]
    assert len(names) == len(set(names))


def test_known_prices() -> None:
    api = find_api("gpt-4o")
    assert (api.input_usd, api.cached_input_usd, api.output_usd) == (2.5, 1.25, 10)


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(ConfigError, match="gpt-4o"):
        find_api("gpt4o")
    with pytest.raises(ConfigError, match=r"llama-3\.3-70b@groq"):
        find_api("llama-3.3-70b")


def test_prices_of_ones_own() -> None:
    api = parse_api("mine=2.5/10")
    assert (api.name, api.input_usd, api.output_usd) == ("mine", 2.5, 10)
    assert api.cached_input_usd is None
    assert api.source == OWN
    assert parse_api("gpt-4o=1/2/0.5").cached_input_usd == 0.5
    assert parse_api("GPT-4o") is find_api("gpt-4o")
    for bad in ("mine=", "mine=1", "mine=1/2/3/4", "=1/2", "mine=a/b", "mine=-1/2", "mine=nan/2"):
        with pytest.raises(ConfigError, match="NAME=IN/OUT"):
            parse_api(bad)


def test_a_file_of_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[api]\n"gpt-4o" = { input = 1, output = 2 }\n"mine" = {input=3,output=4}\n')
    own = read_api_prices(path)
    assert find_api("gpt-4o", own).input_usd == 1
    assert find_api("mine", own).output_usd == 4
    assert find_api("gpt-5", own).input_usd == 1.25  # the rest of the table stays
    assert "prices.toml" in own["mine"].source


@pytest.mark.parametrize(
    "text",
    ["", "[api]\nx = 1\n", "[api]\nx = {input=1}\n", "[api]\nx = {input='a', output=1}\n",
     "[api]\nx = {input=1, output=2, price=3}\n", "[api]\nx = {input=-1, output=2}\n", "not toml",
     "[api]\nx = {input=1, output=2, from=['nowhere']}\n"],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.toml"):
        read_api_prices(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_api_prices(tmp_path / "absent.toml")

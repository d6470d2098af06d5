"""--mode: presets that lose to everything else and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.core.modes import PRESETS, Mode
from headrace.core.settings import SettingsFile, all_settings, resolve_settings

KNOWN = {setting.name: setting for setting in all_settings()}


def test_every_mode_has_a_preset_of_known_settings() -> None:
    assert set(PRESETS) == set(Mode)
    for preset in PRESETS.values():
        assert preset.keys() <= KNOWN.keys()


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_sets_what_it_says_and_nothing_else(mode: Mode) -> None:
    plain = resolve_settings({}, {})
    found = resolve_settings({"mode": mode.value}, {})
    for name, setting in KNOWN.items():
        if name in PRESETS[mode]:
            assert found.origins[name] == f"mode {mode}"
        elif name != "mode":
            assert found.value(setting) == plain.value(setting), name
            assert found.origins[name] == "default"
    # The same values, given by hand, are the same configs.
    by_hand = resolve_settings({**PRESETS[mode], "mode": mode.value}, {})
    assert (found.server, found.engine) == (by_hand.server, by_hand.engine)


def test_every_other_place_wins() -> None:
    file = SettingsFile(name="h.toml", values={"engine": {"policy": "priority"}})
    variables = {"HEADRACE_MODE": "rag", "HEADRACE_MAX_WAITING_TOKENS": "5"}
    found = resolve_settings({"max_step_growth": 3.0}, variables, file)
    assert found.engine.policy == "priority"
    assert found.server.max_waiting_tokens == 5
    assert found.engine.max_step_growth == 3.0
    assert found.origins["policy"] == "h.toml"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat, rag, code, batch, agent"):
        resolve_settings({"mode": "speed"}, {})


def test_the_document_has_the_presets() -> None:
    text = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    for mode, preset in PRESETS.items():
        shown = ", ".join(f"`{name} = {value}`" for name, value in preset.items())
        assert f"| `{mode}` | {shown} |" in text

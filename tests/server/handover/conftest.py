"""The engine's tiny model, for hand-overs."""

from __future__ import annotations

from tests.engine.conftest import tiny_model as tiny_model

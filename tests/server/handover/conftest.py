from __future__ import annotations

from tests.engine.conftest import tiny_model as tiny_model

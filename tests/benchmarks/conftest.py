"""Benchmarks are scripts beside the package: their folder is put on the path for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(_FOLDER))
sys.path.append(str(_FOLDER / "cuda"))

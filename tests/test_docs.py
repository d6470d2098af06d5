"""The documents name files: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "src/headrace/backends/cpu/kernels"


def named_files(document: Path) -> list[str]:
    """Words inside backquotes that end as our files do."""
    spans = re.findall(r"`([^`\n]+)`", document.read_text())
    words = [word for span in spans for word in span.split()]
    return [w for w in words if re.fullmatch(r"[\w./-]+\.(?:py|cpp|h|md|toml|txt)", w)]


@pytest.mark.parametrize(
    "name", ["docs/walk.md", "docs/gpu.md", "README.md", "benchmarks/README.md"]
)
def test_files_that_a_document_names_exist(name: str) -> None:
    document = ROOT / name
    names = named_files(document)
    assert names
    places = (ROOT, ROOT / "src/headrace", KERNELS, document.parent)
    missing = [n for n in names if not any((place / n).exists() for place in places)]
    # Files of a model or a user, not of ours.
    assert set(missing) <= {"model.gguf", "message.txt", "headrace.toml"}


def test_the_walk_passes_every_file() -> None:
    walk = (ROOT / "docs/walk.md").read_text()
    source = ROOT / "src/headrace"
    files = [p.relative_to(source) for p in source.rglob("*.py") if not p.name.startswith("__")]
    assert files
    assert sorted(str(f) for f in files if f"`{f}`" not in walk) == []


def test_the_walk_passes_every_package() -> None:
    walk = (ROOT / "docs/walk.md").read_text()
    packages = [p.parent.name for p in (ROOT / "src/headrace").glob("*/__init__.py")]
    assert [p for p in packages if f"{p}/" not in walk] == []

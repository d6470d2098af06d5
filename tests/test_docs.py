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


def test_every_file_says_what_it_is() -> None:
    """The walk gives the order; what a file is, its own first lines say."""
    files = list((ROOT / "src/headrace").rglob("*.py"))
    assert files
    assert [str(path) for path in files if not path.read_text().startswith(('"""', "'''"))] == []


def test_the_walk_passes_every_package() -> None:
    walk = (ROOT / "docs/walk.md").read_text()
    source = ROOT / "src/headrace"
    packages = [str(p.parent.relative_to(source)) for p in source.rglob("*/__init__.py")]
    inside = ("server/api/", "backends/cuda/")  # folders whose parts the walk need not name
    wanted = [p for p in packages if not p.startswith(inside)]
    assert [p for p in wanted if f"{p}/" not in walk] == []
    assert len(walk.splitlines()) < 80

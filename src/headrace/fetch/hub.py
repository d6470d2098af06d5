"""Models from the hub by id, "org/name", with huggingface_hub when the `hub` extra is installed.

Chooses files by name: weights in safetensors or GGUF, JSON and tokenizer files. Never code, never
pickle. Knows nothing of what is inside the files.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.disk import disk_full, is_full
from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    ModelNotFoundError,
    OfflineError,
    WeightsError,
)
from headrace.core.version import install_extra

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<file>[\w./ -]+\.gguf))?",
    re.ASCII,
)
# Beside the weights. merges.txt and vocab.json are the older form of a tokenizer.
_OTHER_DISK = "Free some space, or set HF_HOME to a folder on another disk."
_SIDE_FILES = ("tokenizer.model", "merges.txt", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def parse_hub_id(text: str) -> HubId | None:
    """Parses org/name, org/name@revision, org/name:file.gguf or all three; None for other text."""
    match = _ID.fullmatch(text)
    if match is None or any(".." in part for part in match.groups("")):
        return None
    return HubId(match["repo"], match["revision"], match["file"])


def choose_files(hub_id: HubId, names: Iterable[str]) -> list[str]:
    """Which files to fetch: one GGUF, or the safetensors with their config and tokenizer files."""
    top = sorted(names)
    if hub_id.file is not None:
        if hub_id.file in top:
            return [hub_id.file]
        raise _choose_one(hub_id, top, f"has no file {hub_id.file!r}")
    if folder := _weights_and_sides(name for name in top if "/" not in name):
        return folder
    ggufs = [name for name in top if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise _choose_one(hub_id, top, f"holds {len(ggufs)} GGUF files")
    raise WeightsError(
        f"{hub_id} has neither config.json with safetensors nor a GGUF file.",
        "Headrace never loads pickle (.bin, .pt): choose a repository with safetensors or GGUF.",
    )


def loaded_names(names: Iterable[str]) -> list[str]:
    """Those files of a model's folder that loading reads."""
    listed = list(names)
    return _weights_and_sides(listed) or [n for n in listed if n.endswith(".gguf")]


def _weights_and_sides(names: Iterable[str]) -> list[str]:
    """The safetensors, then config and tokenizer files; nothing where some are missing."""
    flat = list(names)
    # "consolidated" is a second copy of the same weights under other names.
    weights = [n for n in flat if n.endswith(".safetensors") and not n.startswith("consolidated")]
    if not weights or "config.json" not in flat:
        return []
    return weights + [n for n in flat if n.endswith(".json") or n in _SIDE_FILES]


def snapshot_id(path: Path) -> HubId | None:
    """The hub id that a file in the hub's cache was fetched by; None for a file elsewhere."""
    for folder in path.parents:
        kind, _, repo = folder.parent.parent.name.partition("--")
        if folder.parent.name == "snapshots" and kind == "models":
            file = path.relative_to(folder).as_posix()
            gguf = file if file.endswith(".gguf") else None
            return HubId(repo.replace("--", "/"), folder.name, gguf)
    return None


def _choose_one(hub_id: HubId, names: list[str], found: str) -> ModelNotFoundError:
    ggufs = [name for name in names if name.endswith(".gguf")]
    listed = ", ".join(ggufs[:8]) + (", ..." if len(ggufs) > 8 else "")
    return ModelNotFoundError(
        f"{hub_id.repo} {found}; its GGUF files: {listed or 'none'}.",
        f"Name one: {hub_id.repo}:FILE.gguf.",
    )


def _client(hub_id: HubId) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{hub_id} is a hub id, and the hub client is not installed.",
            f"{install_extra('hub')}; or give a GGUF file or a folder.",
        ) from None
    return huggingface_hub


def download_file(hub_id: HubId, folder: Path) -> Path:
    """Fetches one file straight into `folder`; no copy is kept in the hub's cache."""
    huggingface_hub = _client(hub_id)
    try:
        found = huggingface_hub.hf_hub_download(
            hub_id.repo, hub_id.file, revision=hub_id.revision, local_dir=folder
        )
    except Exception as error:
        if is_full(error):
            raise disk_full(folder) from error
        raise _explain(hub_id, error, offline=False) from error
    return Path(found)


def fetch(hub_id: HubId, *, offline: bool) -> Path:
    """The snapshot's folder, or the GGUF in it. Uses the hub's own cache and token."""
    huggingface_hub = _client(hub_id)
    repo, revision = hub_id.repo, hub_id.revision
    try:
        if offline:
            folder = Path(
                huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True)
            )
            names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
            chosen = choose_files(hub_id, names)
        else:
            names = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
            chosen = choose_files(hub_id, names)
            patterns = [glob.escape(name) for name in chosen]
            folder = Path(
                huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns)
            )
    except HeadraceError:
        raise
    except (
        Exception
    ) as error:  # its error classes move between modules from release to release; their names stay
        if is_full(error):
            raise disk_full(getattr(error, "filename", None), _OTHER_DISK) from error
        raise _explain(hub_id, error, offline) from error
    return folder / chosen[0] if chosen[0].endswith(".gguf") else folder


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRepository:
    name: str  # org/name
    folder: Path
    size_bytes: int
    modified_s: float
    loadable: tuple[Path, ...]  # each snapshot's folder, or its GGUFs


def cached_repositories() -> list[CachedRepository]:
    """Models in the hub's cache with files that can be loaded. Empty where the hub client is not
    installed."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        scanned = scan_cache_dir()
    except (CacheNotFound, OSError, ValueError):
        return []
    found = []
    for repo in scanned.repos:
        loadable = [
            path
            for revision in repo.revisions
            for path in _loadable(
                Path(revision.snapshot_path), [Path(file.file_path) for file in revision.files]
            )
        ]
        if repo.repo_type == "model" and loadable:
            found.append(
                CachedRepository(
                    name=repo.repo_id,
                    folder=Path(repo.repo_path),
                    size_bytes=repo.size_on_disk,
                    modified_s=repo.last_modified,
                    loadable=tuple(loadable),
                )
            )
    return sorted(found, key=lambda repository: repository.name)


def _loadable(snapshot: Path, files: list[Path]) -> list[Path]:
    if any(path.suffix == ".safetensors" for path in files):
        return [snapshot]
    return [path for path in files if path.suffix == ".gguf"]


def _explain(hub_id: HubId, error: Exception, offline: bool) -> HeadraceError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if offline:
        return OfflineError(
            f"{hub_id} is not in the hub cache, and fetching is off.",
            "Fetch it once without --offline and HEADRACE_OFFLINE, or give a GGUF file or folder.",
        )
    if "GatedRepoError" in kinds:
        return ModelNotFoundError(
            f"{hub_id} is gated: {said}",
            "Accept its terms on the hub, then set HF_TOKEN to a token that may read it.",
        )
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        return ModelNotFoundError(
            f"{hub_id} was not found on the hub: {said}",
            "Check the spelling; a private repository needs HF_TOKEN.",
        )
    return OfflineError(
        f"{hub_id} could not be fetched: {type(error).__name__}: {said}",
        "Check the network; or give the path of a GGUF file or of a folder.",
    )

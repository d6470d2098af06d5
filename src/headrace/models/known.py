"""Public models by name, offline: what a user may type, the ModelSpec it stands for, and where its
numbers come from.

The numbers are in data/known.json: config.json fields as published, reduced to those that change a
count. Reads that file and nothing else; weights and tokenizers are other packages' matter.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from headrace.core.errors import UnsupportedModelError
from headrace.models.config_spec import spec_of_config
from headrace.models.spec import ModelSpec

__all__ = ["Known", "all_known", "find_known", "spec_of_config"]

_NEAR = 5  # names in an error
# What tells apart checkpoints of one shape: tried without, where a name is not known with it.
_TUNED = re.compile(r"-(instruct|chat|it|base|hf|thinking|gguf)(?=-|$)")
_PREFIXES = ("meta-", "nvidia-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One public checkpoint."""

    id: str  # as on the hub: "meta-llama/Meta-Llama-3.1-8B"
    names: tuple[str, ...]  # short ones that find it, in lower case
    precision: str  # of the checkpoint's weights: a name of precision.PRECISIONS
    source: str  # where the numbers were read
    config_id: str  # whose config it shares

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of its config.json that change a count."""
        config: Mapping[str, object] = _data()["configs"][self.config_id]
        return config

    @property
    def spec(self) -> ModelSpec:
        return _spec(self.config_id)


def find_known(name: str) -> Known:
    """The model that a user names: a hub id, its last part, or a short name, in any case, with
    spaces or underscores for hyphens. Tuned variants find the model that they were made from."""
    by_name = _by_name()
    for candidate in _readings(name):
        if candidate in by_name:
            return by_name[candidate]
    wanted = _plain(name)
    near = difflib.get_close_matches(wanted, by_name, n=_NEAR, cutoff=0.5)
    near = near or [known for known in by_name if wanted and wanted in known][:_NEAR]
    like = f"; near it: {', '.join(near)}" if near else ""
    raise UnsupportedModelError(
        f"{name[:80]!r} is not a model that Headrace knows by name{like}.",
        "Use one of its names, or give the model's config.json, folder or GGUF file.",
        param="model",
    )


def all_known() -> tuple[Known, ...]:
    """All public models, by id."""
    return tuple(
        Known(
            id=entry["id"],
            names=tuple(dict.fromkeys([*_short_names(entry["id"]), *entry.get("names", ())])),
            precision=entry["precision"],
            source=entry["source"],
            config_id=entry["config"],
        )
        for entry in _data()["models"]
    )


def _readings(name: str) -> Iterator[str]:
    """The ways to read a typed name, the most exact first."""
    full = _plain(name)
    tail = full.rpartition("/")[2]
    yield full
    yield tail
    for prefix in _PREFIXES:
        yield tail.removeprefix(prefix)
    bare = _TUNED.sub("", tail)
    yield bare
    yield re.sub(r"^([a-z]+)-?(\d)", r"\1-\2", bare)  # llama3.1-8b, or qwen-2.5-7b below
    yield re.sub(r"^([a-z]+)-?(\d)", r"\1\2", bare)


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _short_names(model_id: str) -> list[str]:
    tail = _plain(model_id).rpartition("/")[2]
    names = [tail]
    for prefix in _PREFIXES:
        names.append(tail.removeprefix(prefix))
    return list(dict.fromkeys(names))


@cache
def _by_name() -> dict[str, Known]:
    """Ids and explicit names win over short names that are made from an id."""
    found: dict[str, Known] = {}
    for known in all_known():
        found[_plain(known.id)] = known
    for known in all_known():
        for name in known.names:
            found.setdefault(name, known)
    return found


@cache
def _data() -> dict:  # type: ignore[type-arg]  # JSON of our own
    file = resources.files("headrace.models") / "data" / "known.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


@cache
def _spec(config_id: str) -> ModelSpec:
    return spec_of_config(_data()["configs"][config_id], where=f"{config_id} (config.json)")

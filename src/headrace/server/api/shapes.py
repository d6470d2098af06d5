"""The answers of small endpoints, for the OpenAPI description only: they answer with dicts.

tests/server/api/test_schemathesis.py checks that both agree.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Health(msgspec.Struct):
    status: Literal["ok"]


class Ready(msgspec.Struct):
    ready: bool


class Handover(msgspec.Struct):
    role: Literal["both", "prefill", "decode"]
    host: str | None
    port: int | None
    fingerprint: str


class Load(msgspec.Struct):
    """Null while there is no engine. Cached blocks are free: they give way."""

    server_load: int
    running: int | None
    waiting: int | None
    waiting_tokens: int | None
    free_blocks: int | None
    cache_tokens: int | None
    saturation: float | None


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    model_max_length: int | None
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


class Version(msgspec.Struct):
    version: str
    fingerprint: str
    # To operators.
    identity: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    config: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    context_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    origins: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    kv_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    max_sequences: int | msgspec.UnsetType | None = msgspec.UNSET
    block_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    max_batch_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    max_step_growth: float | msgspec.UnsetType | None = msgspec.UNSET
    ledger_bytes: dict[str, dict[str, int]] | msgspec.UnsetType | None = msgspec.UNSET
    speculate: str | msgspec.UnsetType | None = msgspec.UNSET


class Objective(msgspec.Struct):
    """What --slo promises, and how it stands."""

    text: str
    share: float
    within: int
    missed: dict[str, int]
    headroom: float | None
    burn_rate_5m: float | None
    burn_rate_1h: float | None


class Peaks(msgspec.Struct):
    """What the device can do at most, a second."""

    flops_s: float
    bytes_s: float
    source: str


class History(msgspec.Struct):
    """Samples of the server's numbers: a list for each column, null where there was no value."""

    schema: Literal["headrace-history/1"]
    window: Literal["5m", "1h", "24h"]
    now_s: float
    model: str
    engine_is_up: bool
    columns: dict[str, list[float | None]]
    totals: dict[str, float]
    objective: Objective | None
    peaks: Peaks | None


class Diagnosis(msgspec.Struct):
    """What the doctor's rules find in the server's own metrics; docs/doctor.md has the fields."""

    schema: Literal["headrace-diagnosis/1"]
    period_s: float
    findings: list[dict[str, Any]]
    explained: list[dict[str, Any]]
    notes: list[str]


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


class Response(msgspec.Struct):
    """Of OpenAI's newer API; it has more fields than these."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class Deleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

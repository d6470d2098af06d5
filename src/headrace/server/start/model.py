"""The model as the HTTP process needs it: tokenizer, template, default sampling values, identity.

Reads headers and a few bytes of each tensor; loads no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.assemble import read_chat_template, read_tokenizer
from headrace.core.config import EngineConfig
from headrace.core.sampling import model_defaults
from headrace.core.server_config import ServerConfig
from headrace.fetch.catalog import entry_of
from headrace.server.request.service import ServedModel
from headrace.server.start.fingerprint import Identity, identify
from headrace.weights.describe import describe_file
from headrace.weights.load import open_weights
from headrace.weights.sampling_defaults import read_sampling_defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifiedModel:
    model: ServedModel
    identity: Identity  # without the backend's facts


def read_model(
    path: Path,
    name: str,
    *,
    server: ServerConfig,
    engine: EngineConfig,
    typed: str | None = None,
) -> IdentifiedModel:
    """`name` is the model's own; `typed` is what the user gave as MODEL."""
    file = open_weights(path, engine.load_format)
    try:
        spec, _ = describe_file(file, engine.context_tokens)
        tokenizer = read_tokenizer(file)
        sampling_defaults = read_sampling_defaults(path, file, engine.generation_config)
        identity = identify(file, spec, tokenizer.chat_template, server=server, engine=engine)
    finally:
        file.close()
    entry = entry_of(path)
    first, *others = server.served_names or (name,)
    aliases = {name, typed, *(() if entry is None else (entry.name, *entry.aliases, entry.hub_id))}
    model = ServedModel(
        name=first,
        other_names=tuple(others),
        aliases=frozenset(alias for alias in aliases if alias),
        tokenizer=tokenizer,
        template=read_chat_template(tokenizer),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        sampling_defaults=sampling_defaults,
    )
    # They shape the answers of requests that give no sampling values.
    identity["sampling"] = model_defaults(sampling_defaults)
    return IdentifiedModel(model=model, identity=identity)

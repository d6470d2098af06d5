"""The default model's tokenizer as the files that transformers reads, made from its GGUF.

Load generators count tokens by themselves, with a tokenizer from a hub or a folder; tests have no
hub. Knows files of tokenizers, nothing of clients.
"""

from __future__ import annotations

import json
from pathlib import Path

from headrace.tokenizer.gguf_vocabulary import read_gguf_vocabulary
from headrace.weights.files.gguf import GgufFile


def write_tokenizer_files(model: Path, folder: Path) -> Path:
    """tokenizer.json and tokenizer_config.json of a GGUF; the folder."""
    with GgufFile.open(model) as file:
        vocabulary = read_gguf_vocabulary(file.metadata)
    assert vocabulary.eos_id is not None
    end = vocabulary.pieces[vocabulary.eos_id]
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "chat_template": vocabulary.chat_template,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder

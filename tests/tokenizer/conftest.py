"""What the tokenizer tests share: a varied corpus, small vocabularies, the default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from headrace.tokenizer.tokenizer import Tokenizer
from headrace.weights.files.gguf import GgufFile

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # note\n\n\n    if x >= 10 != 42:\n        pass",
    "for (int i = 0; i < n; ++i) { a[i] += b->c[i] * 3.14e-10f; } /* ok */",
    "SELECT * FROM t WHERE a='it''s' AND b LIKE '%x_y%';",
    "I'm you're HE'LL we'Ve don't 'tis O'Neil’s",
    "camelCase HTTPServer XMLHttpRequest2 snake_case SCREAMING_CASE",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇫🇷🇯🇵, 👍🏽, ☃️",
    "日本語のテキストと漢字。中文字符，没有空格！한국어 문장입니다.",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם, מה נשמע? \u200fRTL\u200e",
    "cafe\u0301 vs café; a\u0300\u0301\u0302\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "नमस्ते दुनिया ไทยไม่มีช่องว่าง Ελληνικά ΚΕΦΑΛΑΊΑ Русский текст",
    "tabs\t\ttabs\t \t spaces     five\n\n\nnewlines\r\nCRLF\r\n\r\n \n \n\r",
    "nul\x00 bell\x07 esc\x1b[31m del\x7f c1\x85\x9f nbsp\xa0 zw\u200b bom\ufeff \u2028 \u2029",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0xDEADBEEF ½ ² ٣٤٥ 一二三 Ⅷ 2024-02-29",
    "a" * 700,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft " * 3,
    "=" * 90 + "\n" + "-" * 33 + "   " + "." * 17 + "/" * 9 + "\n",
    "http://example.com/a/b?c=d&e=%20f#g user@example.com C:\\path\\to\\file.txt",
    "𝕬𝖑𝖌𝖊𝖇𝖗𝖆 𝟙𝟚𝟛 \U0010ffff \ue000 \ufffd",
    "<not a token> <|nor this|> [INST] <0x0A> <unused> ▁mark ĠG",
    "if (a) {}\n/usr/bin --x=(1);\n//y\n'''/\r\n/",
    "\n",
    "\n\n leading newline",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


def train_byte_level(split: str | None, size: int = 700) -> tokenizers.Tokenizer:
    """A byte-level BPE of the corpus, its words cut by `split`, special tokens first."""
    backend = tokenizers.Tokenizer(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def train() -> Callable[..., tokenizers.Tokenizer]:
    return train_byte_level


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder: a tokenizer and any other JSON or text files by name."""

    def write(backend: tokenizers.Tokenizer | None, **files: object) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def chatml(make_folder: Callable[..., Path]) -> Tokenizer:
    """A small tokenizer with ChatML's tokens, a bos put first by tokenizer.json."""
    backend = train_byte_level(None)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return Tokenizer.from_folder(
        make_folder(
            backend,
            tokenizer_config__json={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        )
    )


@pytest.fixture(scope="session")
def default_metadata(default_model_path: Path) -> dict[str, object]:
    with GgufFile.open(default_model_path) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def default_tokenizer(default_metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(default_metadata)

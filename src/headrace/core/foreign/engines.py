"""All engines whose words are known."""

from __future__ import annotations

from headrace.core.foreign.llama_cpp import LLAMA_CPP
from headrace.core.foreign.lmdeploy import LMDEPLOY
from headrace.core.foreign.ollama import OLLAMA
from headrace.core.foreign.sglang import SGLANG
from headrace.core.foreign.tgi import TGI
from headrace.core.foreign.trtllm import TRTLLM
from headrace.core.foreign.vllm import VLLM

# Where two engines have the same word, the first one's meaning is taken on our own command line.
ENGINES = {
    engine.name: engine for engine in (VLLM, SGLANG, LLAMA_CPP, TGI, LMDEPLOY, TRTLLM, OLLAMA)
}

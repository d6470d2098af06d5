"""Other engines' words: their flags read, and our settings written as theirs.

from headrace.dialects import emit, read_command
reading = read_command("vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192")
emitted = emit(reading.deployment, "sglang")
"""

from headrace.dialects.deployment import Deployment, Speculation
from headrace.dialects.read import Reading, engine_names, find_engine, read_command
from headrace.dialects.write import Emitted, emit, emit_names

__all__ = [
    "Deployment",
    "Emitted",
    "Reading",
    "Speculation",
    "emit",
    "emit_names",
    "engine_names",
    "find_engine",
    "read_command",
]

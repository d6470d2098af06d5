"""A row of silicon.csv as Headrace sees it: the model's formats, its layout on GPUs, the work of a
step and the clients' closed loop.

What the rows do not say is decided here, the same for all rows of a kind: which parts of a model a
quantized checkpoint quantizes, the type of KV, and the memory that an engine leaves for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.hardware.gpus import Gpu, find_gpu
from headrace.models.known import find_known
from headrace.models.spec import ModelSpec
from headrace.simulate.closed_loop import Loop, loop_of
from headrace.simulate.roofline import IDEAL, Peaks, peaks_of, step_times
from headrace.simulate.step_work import Format, Formats, Layout, StepWork, step_work
from planning.silicon_rows import Row

BF16 = Format(value_bytes=2.0)
FP8 = Format(value_bytes=1.0, computes="fp8")
NVFP4 = Format(value_bytes=0.5625, computes="fp4")  # a scale of 8 bits for 16 values
MXFP4 = Format(value_bytes=0.53125, computes="fp8")  # of 32 values; activations are FP8, if at all
INT4 = Format(value_bytes=0.5625)  # groups of 32, widened before they are multiplied
# Names in the rows that are not those of a model that is known.
SAME_SHAPE = {
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
MEMORY_SHARE = 0.9  # of the GPU, that engines use by default,
TIGHT_SHARE = 0.95  # and where weights leave little (dsr1_fp8_b200.sh of the same scripts, 4 GPUs)
OTHER_BYTES = 3e9  # activations, graphs, runtime
STEP_TOKENS = 8192  # of all rows: the scripts that took most of them set this or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    row: Row
    gpu: Gpu
    formats: Formats
    work: StepWork
    peaks: Peaks
    loop: Loop


def family(model: str) -> str:
    """Models of one shape: they are left out together."""
    name = model.rpartition("/")[2]
    return "DeepSeek-V3" if name.startswith("DeepSeek") else name.removesuffix("-NVFP4")


def case_of(row: Row) -> Case:
    spec = find_known(SAME_SHAPE.get(row.model, row.model)).spec
    gpu = find_gpu(row.gpu)
    formats = formats_of(row, spec, gpu)
    layout = Layout(
        tp=row.gpus // row.attention_copies,
        copies=row.attention_copies,
        expert_parallel=row.expert_parallel if spec.active_parameters < spec.parameters else 1,
    )
    work = step_work(spec, formats, layout)
    peaks = peaks_of(gpu, work)
    loop = loop_of(
        step_times(work, peaks, IDEAL),
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        clients=row.concurrency,
        room_tokens=room_tokens(gpu, work),
        step_tokens=STEP_TOKENS,
    )
    return Case(row=row, gpu=gpu, formats=formats, work=work, peaks=peaks, loop=loop)


def formats_of(row: Row, spec: ModelSpec, gpu: Gpu) -> Formats:
    """As the checkpoints of these models are: NVFP4 and INT4 ones with experts keep attention in 16
    bits; FP8 ones quantize everything but the output layer; gpt-oss has MXFP4 experts alone."""
    experts = spec.active_parameters < spec.parameters
    kv = _kv_value_bytes(row, gpu)
    if row.model.startswith("openai/gpt-oss"):
        kept = MXFP4 if "fp4" in gpu.flops else Format(value_bytes=MXFP4.value_bytes)
        return Formats(attention=BF16, mlp=BF16, experts=kept, kv_value_bytes=kv)
    if row.precision == "nvfp4":
        kept = NVFP4 if "fp4" in gpu.flops else Format(value_bytes=NVFP4.value_bytes)
        attention = BF16 if experts else kept
        return Formats(attention=attention, mlp=kept, experts=kept, kv_value_bytes=kv)
    if row.precision == "int4_wo":
        return Formats(attention=BF16, mlp=BF16, experts=INT4, kv_value_bytes=kv)
    kept = FP8 if row.precision.startswith("fp8") else BF16
    return Formats(attention=kept, mlp=kept, experts=kept, kv_value_bytes=kv)


def _kv_value_bytes(row: Row, gpu: Gpu) -> float:
    """The rows do not say. Most were taken by the scripts of SemiAnalysisAI/InferenceX (commit
    843c625, benchmarks/single_node): with quantized weights they ask for FP8 KV on Blackwell, of
    TensorRT-LLM, and of vLLM on an H200; not for gpt-oss or INT4, nor else on Hopper."""
    if row.precision in ("bf16", "int4_wo") or row.model.startswith("openai/gpt-oss"):
        return 2.0
    if row.engine == "trtllm":
        return 1.0
    if "fp4" in gpu.flops or (row.engine == "vllm" and row.gpu.startswith("h200")):
        return 1.0
    return 2.0


def room_tokens(gpu: Gpu, work: StepWork) -> float:
    """Context tokens that the memory left by the weights holds, in all copies of attention."""
    assert gpu.memory_bytes is not None
    share = TIGHT_SHARE if work.weight_bytes > 0.8 * gpu.memory_bytes else MEMORY_SHARE
    room = max(1e8, gpu.memory_bytes * share - work.weight_bytes - OTHER_BYTES)
    # Windows are kept as windows by these engines: their share does not grow.
    token_bytes = sum(span.read_bytes for span in work.spans if span.limit > 1024)
    return room / token_bytes * work.copies

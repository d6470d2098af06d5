"""One question of `headrace fit`, answered: a model, a GPU and the flags in, a Report out.

Asks plan/ and backends/demands.py; prints nothing. Reads headers only, and fetches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.core.sizes import parse_share

if TYPE_CHECKING:
    from headrace.backends.demands import Setup
    from headrace.fits.model import FoundModel
    from headrace.hardware.gpus import Gpu
    from headrace.models.stages import Stage
    from headrace.plan.fit import Demand, Fit
    from headrace.plan.fit_changes import Choice
    from headrace.plan.fit_engines import EngineAnswer
    from headrace.plan.fit_text import Report
    from headrace.plan.fit_work import Floors

DEFAULT_CONTEXT = 8_192  # or the model's, if that is shorter: its maximum is rarely what is meant
DEFAULT_PROMPT = 512
DEFAULT_SHARE = "0.9"
DEFAULT_HOST = "ddr5-8ch-4800"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags, as they were given."""

    gpu: str | None = None
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    divided_by: str = "vllm"  # the engine that divides layers among stages
    context: int | None = None
    concurrency: int = 1
    prompt: int | None = None
    quant: str | None = None
    kv_dtype: str | None = None
    draft: str | None = None
    gpu_memory: str = DEFAULT_SHARE
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    host: str = DEFAULT_HOST
    profile: Path | None = None
    graphs: bool = True
    takes_whole_context: bool = False  # without --context: engines serve the model's own


def make_report(wanted: str, asked: Asked, notes: tuple[str, ...] = ()) -> Report:
    from headrace.fits.model import find_model

    found = find_model(wanted)
    gpu, more = _find_gpu(asked.gpu) if asked.profile is None else _measured(asked)
    return report_on(found, gpu, asked, [*notes, *more])


def report_on(found: FoundModel, gpu: Gpu, asked: Asked, notes: list[str]) -> Report:
    """Reads no file: the model and the GPU are known."""
    return _Reporter(found, gpu, asked, notes).report()


def _find_gpu(name: str | None) -> tuple[Gpu, list[str]]:
    """This machine's GPU, or else its CPU, where none is named."""
    from headrace.hardware.gpus import find_gpu
    from headrace.hardware.this_machine import gpus_here, this_machine

    if name is not None and name.lower() not in ("here", "this-machine"):
        return find_gpu(name), []
    for seen in gpus_here():
        if seen.gpu is not None:
            return seen.gpu, []
    return this_machine(), ["no GPU was named and none is here: this is the machine's own memory"]


def _measured(asked: Asked) -> tuple[Gpu, list[str]]:
    """The machine that a profile was measured on."""
    from headrace.hardware.profile import load_profile
    from headrace.hardware.this_machine import measured_machine

    if asked.profile is None or asked.gpu is not None:
        raise ConfigError(
            f"--profile and --gpu {asked.gpu} both say what to fit on; expected one.",
            "Leave one of them out.",
            param="profile",
        )
    profile = load_profile(asked.profile)
    return measured_machine(profile), [
        f"bandwidth and rate are those that headrace calibrate measured on {profile.date[:10]}; "
        "weights that stay in the processor's cache can be read faster than memory"
    ]


class _Reporter:
    """One question: a model, a GPU, and the flags."""

    def __init__(self, found: FoundModel, gpu: Gpu, asked: Asked, notes: list[str]) -> None:
        self.found, self.gpu, self.asked, self.notes = found, gpu, asked, notes
        self.spec = found.spec
        self.pp = asked.pp or 1
        self.gpus = asked.gpus or (asked.tp or 1) * self.pp
        self.tp = asked.tp or max(1, self.gpus // self.pp)
        self.context = self._context()
        self.share = parse_share(asked.gpu_memory, "gpu_memory")
        self.memory = self._memory()

    def report(self) -> Report:
        from headrace.hardware.gpus import find_gpu
        from headrace.models.kv import kv_bytes
        from headrace.plan.fit_changes import Choice, changes
        from headrace.plan.fit_engines import engine_answers
        from headrace.plan.fit_text import Report

        self._check()
        choice = Choice(
            precision=self.precision,
            kv_dtype=self.kv_dtype,
            tp=self.tp,
            context_tokens=self.context,
            concurrency=self.each_concurrency,
            pp=self.pp,
        )
        fit = self._fit(choice)
        held = fit.demand.held_tokens(self.context)
        rate, flops = self._rate(self.precision)
        engines: tuple[EngineAnswer, ...] = ()
        if not fit.fits:
            engines = tuple(
                engine_answers(
                    fit,
                    bandwidth_bytes_s=self.gpu.bandwidth_bytes_s,
                    host_bandwidth_bytes_s=find_gpu(self.asked.host).bandwidth_bytes_s,
                )
            )
        return Report(
            model=self.found.name,
            source=self.found.source,
            gpu=self.gpu.name,
            gpus=self.gpus,
            replicas=self.replicas,
            share=self.share if isinstance(self.share, float) else None,
            fit=fit,
            floors=self._floors(fit, flops),
            rate=rate,
            bandwidth_bytes_s=self.gpu.bandwidth_bytes_s,
            flops_s=flops,
            others_bytes=kv_bytes(
                fit.demand.here, held, self._value_bytes, keeps_windows=True, tp=self.tp
            ),
            changes=() if fit.fits else tuple(changes(choice, fit, self._attempt)),
            engines=engines,
            notes=(*self._notes(fit), *self.notes),
        )

    @property
    def precision(self) -> str:
        return self.asked.quant.lower() if self.asked.quant else self.found.precision

    @property
    def kv_dtype(self) -> str:
        default = "f16" if self.gpu.kind == "cpu" else "bf16"
        return self.asked.kv_dtype or default

    @property
    def _value_bytes(self) -> float:
        from headrace.backends.demands import kv_value_bytes

        return kv_value_bytes(self.kv_dtype)

    @property
    def each_concurrency(self) -> int:
        """Of one replica."""
        return -(-self.asked.concurrency // max(1, self.replicas))

    @property
    def each_gpus(self) -> int:
        """Of one replica."""
        return self.tp * self.pp

    @property
    def replicas(self) -> int:
        return self.gpus // self.each_gpus

    def _context(self) -> int:
        whole = self.spec.context_tokens
        if self.asked.context is None:
            return whole if self.asked.takes_whole_context else min(DEFAULT_CONTEXT, whole)
        if self.asked.context > whole:
            raise ConfigError(
                f"context is {self.asked.context}; the model's is {whole}.",
                f"Set --context {whole} or less.",
                param="context",
            )
        return self.asked.context

    def _memory(self) -> int:
        from headrace.backends.shared.host import memory_bytes
        from headrace.hardware.this_machine import NAME

        found = self.gpu.memory_bytes or self.gpu.nominal_bytes
        if found is not None:  # a container may have less than its host
            return min(found, memory_bytes()[0] or found) if self.gpu.name == NAME else found
        if isinstance(self.share, int):
            return self.share
        raise ConfigError(
            f"How much memory {self.gpu.name} has is not in the table: it depends on the host.",
            "Set --gpu-memory to its bytes, as in --gpu-memory 256GiB.",
            param="gpu_memory",
        )

    def _check(self) -> None:
        from headrace.models.precision import check_tp, find_precision

        if self.gpus % self.each_gpus:
            product = f"tp, which is {self.tp}"
            if self.pp > 1:
                product = f"tp x pp, which is {self.tp} x {self.pp} = {self.each_gpus}"
            least = -(-self.gpus // self.each_gpus) * self.each_gpus
            raise ConfigError(
                f"{self.gpus} GPUs are not a multiple of {product}.",
                f"Set --gpus {least}, or --tp 1.",
                param="tp",
            )
        name = "bf16" if self.precision == "file" else self.precision
        check_tp(self.spec, find_precision(name), self.tp)
        if self.each_gpus > 1 and self.gpu.kind == "cpu":
            raise ConfigError(
                f"{self.each_gpus} GPUs are to share a model, and {self.gpu.name} is a CPU host.",
                "Name a GPU, as in --gpu h100-sxm: `headrace gpus` lists them.",
                param="gpu",
            )
        if problem := self._no_fp8(self.precision, self.kv_dtype):
            raise problem

    def _no_fp8(self, precision: str, kv_dtype: str) -> ConfigError | None:
        from headrace.backends.cuda.device import FP8_CAPABILITY
        from headrace.models.precision import find_precision

        if self.gpu.capability is None or self.gpu.vendor != "NVIDIA":
            return None
        if tuple(map(int, self.gpu.capability.split("."))) >= FP8_CAPABILITY:
            return None
        has = f"{self.gpu.name} has compute capability {self.gpu.capability}; FP8 needs 8.9"
        if kv_dtype == "fp8":
            return ConfigError(f"{has}.", "Set --kv-dtype bf16.", param="kv_dtype")
        if precision != "file" and find_precision(precision).computes == "fp8":
            return ConfigError(
                f"{has}, and the weights would be {precision}.",
                "Set --quant int8 or int4, or --gpu l40s or h100-sxm.",
                param="quant",
            )
        return None

    def _attempt(self, choice: Choice) -> Fit | None:
        from headrace.models.precision import find_precision, tp_obstacle

        name = "bf16" if choice.precision == "file" else choice.precision
        if tp_obstacle(self.spec, find_precision(name), choice.tp) is not None:
            return None
        if self._no_fp8(choice.precision, choice.kv_dtype) is not None:
            return None
        if self.gpu.kind == "cpu" and (choice.tp > 1 or choice.kv_dtype == "fp8"):
            return None
        return self._fit(choice)

    def _fit(self, choice: Choice) -> Fit:
        from headrace.models.stages import stages_of
        from headrace.plan.fit import budget_of, fit_on, fit_stages

        if isinstance(self.share, int):
            budget = min(self.share, self.memory)
        else:
            budget = budget_of(self.memory, self.share, self._reserved_bytes)
        sizes = {
            "memory_bytes": self.memory,
            "budget_bytes": budget,
            "context_tokens": choice.context_tokens,
            "concurrency": choice.concurrency,
        }
        if self.pp == 1:
            return fit_on(self._demand(choice), **sizes)
        stages = stages_of(self.spec.layers, self.pp, self.asked.divided_by)
        return fit_stages(tuple(self._demand(choice, stage) for stage in stages), **sizes)

    @property
    def _reserved_bytes(self) -> int:
        from headrace.backends.cuda.device import RESERVED_BYTES

        return 0 if self.gpu.kind == "cpu" else RESERVED_BYTES

    def _demand(self, choice: Choice, stage: Stage | None = None) -> Demand:
        from headrace.backends.demands import Setup
        from headrace.fits.model import find_model

        setup = Setup(
            precision=choice.precision,
            kv_dtype=choice.kv_dtype,
            tp=choice.tp,
            stage=stage,
            max_batch_tokens=self.asked.max_batch_tokens,
            max_sequences=self.asked.max_sequences,
            concurrency=choice.concurrency,
            graphs=self.asked.graphs,
        )
        demand = self._demand_of(self.found, setup)
        if self.asked.draft is None:
            return demand
        draft = find_model(self.asked.draft)
        own = replace(setup, precision=draft.precision, stage=None)
        return replace(demand, draft=self._demand_of(draft, own))

    def _demand_of(self, found: FoundModel, setup: Setup) -> Demand:
        from headrace.backends.demands import demand_on_cpu, demand_on_gpu

        if self.gpu.kind == "cpu":
            return demand_on_cpu(found.spec, setup, weights=found.weights)
        processors = self.gpu.sms or 108
        return demand_on_gpu(found.spec, setup, multiprocessors=processors, weights=found.weights)

    def _rate(self, precision: str) -> tuple[str, float | None]:
        from headrace.models.precision import find_precision

        computes = "bf16" if precision == "file" else find_precision(precision).computes
        if self.gpu.kind == "cpu":  # its products of quantized weights are int8's
            computes = "fp32" if computes == "fp32" else "int8"
        for kind in (computes, "bf16", "fp16"):
            if kind in self.gpu.flops:
                return kind, self.gpu.flops[kind]
        return computes, None

    def _floors(self, fit: Fit, flops: float | None) -> Floors | None:
        from headrace.plan.fit_work import floors

        if flops is None or self.gpu.bandwidth_bytes_s is None:
            return None
        held = fit.demand.held_tokens(self.context)
        return floors(
            fit.demand.work,
            bandwidth_bytes_s=self.gpu.bandwidth_bytes_s,
            flops_s=flops,
            prompt_tokens=min(self.asked.prompt or DEFAULT_PROMPT, self.context),
            context_tokens=self.context,
            concurrency=fit.concurrency,
            sequence_bytes=sum(
                rank.sequence_bytes(held) + rank.state_bytes for rank in fit.ranks or (fit.demand,)
            ),
            stages=self.pp,
        )

    def _notes(self, fit: Fit) -> list[str]:
        notes = [f"the model is {self.found.source}", *fit.demand.notes]
        if self.asked.takes_whole_context:
            notes.append("the command sets no context, so the engine serves the model's own")
        elif self.asked.context is None and self.context < self.spec.context_tokens:
            notes.append(
                f"the context is {self.context:,} tokens by default; the model's own is "
                f"{self.spec.context_tokens:,}: --context sets it"
            )
        if self.gpu.memory_bytes is None and self.gpu.nominal_bytes is not None:
            notes.append(f"{self.gpu.name}: the driver's figure is not known; this is the nominal")
        if self.gpu.kind == "gpu" and self.gpu.vendor != "NVIDIA":
            notes.append(f"Headrace has no kernels for GPUs of {self.gpu.vendor}")
        if self.gpu.kind == "gpu" and self.gpu.sms is None:
            notes.append(f"{self.gpu.name}: its multiprocessors are not known; 108 are assumed")
        if self.found.stored_bytes and self.gpu.kind == "gpu":
            size = self.found.stored_bytes / 2**30
            notes.append(
                f"the file's tensors are {size:,.2f} GiB; here they are held on a GPU as "
                f"{fit.demand.weights.precision}"
            )
        if self.spec.left_out:
            notes.append(f"not counted: {', '.join(self.spec.left_out)}")
        if self.pp > 1:
            sizes = [rank.stage.layers for rank in fit.ranks if rank.stage is not None]
            notes.append(
                f"{self.pp} stages of {', '.join(map(str, sizes))} layers, as "
                f"{self.asked.divided_by} divides them; the fullest decides"
                + (", and each is counted with the draft model" if self.asked.draft else "")
            )
        if self.replicas > 1:
            notes.append(
                f"{self.replicas} replicas of {self.each_gpus} GPUs: each has "
                f"{fit.concurrency:,} of {self.asked.concurrency:,} sequences"
            )
        return notes

"""The CUDA runner: weights on the device, and plans run over them, two in flight.

`submit` writes a plan into the input buffer, copies it to the device, and queues the step's
launches and the copy of its results; `collect` only waits for that copy. The next step reads the
drawn tokens on the device. Decides nothing: block tables and draws come with the plan.

A step runs in order on one stream: a copy of the inputs, the body (CUDA graph or launches), the
head with the argmax (likewise), draws and other results that rows ask for, a copy of the results.
Without a GPU the same launches run synchronously, through Triton's interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backends.cuda.attention.plan import attention_windows, work_shape
from headrace.backends.cuda.block_moves import BlockMoves
from headrace.backends.cuda.device import DEPENDENT_CAPABILITY, taking
from headrace.backends.cuda.draws.sampling import Sampler, Tops
from headrace.backends.cuda.draws.wanted import Wanted
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.kv_sizes import DEFAULT_KV_DTYPE
from headrace.backends.cuda.loading import Loader, prepared_bytes
from headrace.backends.cuda.pooling import Pooling
from headrace.backends.cuda.products.choice import Choices, InvariantChoices
from headrace.backends.cuda.program import Program
from headrace.backends.cuda.step.graphs import Graphs
from headrace.backends.cuda.step.inputs import StepInputs
from headrace.backends.cuda.step.results import Landing, StepInFlight
from headrace.backends.cuda.step.shapes import (
    DRAFT_GRAPH_ROWS,
    GRAPH_ROWS,
    StepShape,
    logit_rows,
    padded_rows,
    row_bucket,
    row_buckets,
)
from headrace.backends.shared.flight import Flight
from headrace.core.closes import Closes
from headrace.core.errors import DeviceLostError, HeadraceError
from headrace.core.ranks import Ranks
from headrace.core.step import Contents, RunnerLimits, StepPlan, StepResult
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

_INTERPRETED_MULTIPROCESSORS = 4  # assumed without a GPU: enough for work to be split


class CudaRunner(Closes):
    """Implements `core.step.Runner`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        *,
        total_blocks: int,
        block_tokens: int = 16,
        max_batch_tokens: int = 8192,
        max_sequences: int = 512,
        context_tokens: int | None = None,
        kv_dtype: str = DEFAULT_KV_DTYPE,
        quantization: str = "none",
        overlap: bool = True,
        graphs: str = "lazy",
        device: torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        dependent: bool = False,
        choices: Choices | None = None,
        release: Callable[[Tensor], None] | None = None,
        ranks: Ranks | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """With `ranks`, model and weights are this rank's share. `draft_tokens`: the most that a
        row may end in, for which graphs are captured too."""
        self._ranks = ranks
        self._device = torch.device("cuda") if device is None else device
        self.kv_dtype = kv_dtype
        self._spec = spec
        self._batch_invariant = batch_invariant
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            context_tokens=min(context_tokens or spec.context_tokens, spec.context_tokens),
            steps_in_flight=2 if overlap else 1,
            counts_previous=True,
            padded_tokens=padded_rows(max_batch_tokens),
            draws_drafts=True,
        )
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._flight: Flight[StepInFlight] = Flight(self._limits, spec.vocab_size)
        # For each row of the last step, the wanted row of its draw.
        self._drawn_at: NDArray[np.int32] = np.empty(0, np.int32)
        self._steps = 0
        self._steps_begun = 0
        self._lost: DeviceLostError | None = None
        self._closed = False
        with self._computing():
            if batch_invariant:
                choices = InvariantChoices()
            elif choices is None and self._cuda:
                choices = Choices.load(torch.cuda.get_device_name(self._device))
            loader = Loader(self._device, dtype, quantization, release)
            self._load(weights, loader, kv_dtype)
            with taking("activations"):
                self._make_sampler()
                self._record(dtype, choices, dependent and has_dependent_launches(self._device))
            self._graphs = Graphs(self._device, enabled=graphs != "off")
            if graphs == "start":
                with taking("graphs"):
                    self.capture_graphs(draft_tokens)

    def _load(self, weights: DecoderWeights[Weight], loader: Loader, kv_dtype: str) -> None:
        with taking("weights"):
            self._weights = loader.load(weights)
        self.weight_bytes = prepared_bytes(self._weights)
        limits = self._limits
        with taking("the KV pool"):
            self._kv = KvPool(
                self._spec, limits.total_blocks, limits.block_tokens, kv_dtype, self._device
            )
        self._moves = BlockMoves(self._kv, self._device)

    def _make_sampler(self) -> None:
        limits = self._limits
        self._logit_rows = logit_rows(limits.max_batch_tokens, limits.max_sequences)
        self._sampler = Sampler(
            self._logit_rows,
            limits.max_batch_tokens + limits.max_sequences,
            limits.max_sequences,
            self._spec.vocab_size,
            self._device,
        )

    def _record(self, dtype: torch.dtype, choices: Choices | None, dependent: bool) -> None:
        spec, limits, device = self._spec, self._limits, self._device
        shape = work_shape(
            spec, limits.max_sequences, multiprocessors_of(device), self._batch_invariant
        )
        self._inputs = StepInputs(
            limits,
            shape,
            head_dim=spec.attention[0].head_dim,
            windows=attention_windows(spec),
            wanted_rows=self._logit_rows,
            vocab_size=spec.vocab_size,
            device=device,
        )
        self._program = Program(
            spec,
            self._weights,
            self._kv,
            self._inputs,
            shape,
            max_rows=limits.max_batch_tokens,
            logit_rows=self._logit_rows,
            context_tokens=limits.context_tokens,
            block_tokens=limits.block_tokens,
            dtype=dtype,
            device=device,
            choices=choices,
            dependent=dependent,
            ranks=self._ranks,
        )
        # One more than steps in flight, so that a refused step does not overwrite another's.
        self._landings = [
            Landing(self._sampler.results.shape[1], device)
            for _ in range(limits.steps_in_flight + 1)
        ]
        self._pooling: Pooling | None = None
        if spec.has_head:
            final_norm = self._weights.final_norm
            assert isinstance(final_norm, torch.Tensor)
            self._pooling = Pooling(self._program.hidden, final_norm, spec.norm_eps)

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def program(self) -> Program:
        return self._program

    @property
    def graphs(self) -> Graphs:
        return self._graphs

    @property
    def progress(self) -> int:
        """The number of steps submitted plus the number of steps that the device has finished."""
        return self._steps + sum(step.is_done for step in self._flight)

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    @property
    def activation_bytes(self) -> int:
        return self._program.nbytes + self._inputs.nbytes + self._sampler.nbytes

    @property
    def graph_bytes(self) -> int:
        return self._graphs.nbytes

    def submit(self, plan: StepPlan) -> None:
        if self._lost is not None:
            raise self._lost
        continued = self._flight.check(plan)
        landing = self._landings[self._steps_begun % len(self._landings)]
        step = StepInFlight(plan, continued, landing)
        with self._computing():
            self._compute(step)
        self._steps_begun += 1
        self._flight.add(plan, step)
        self._steps += 1

    def collect(self) -> StepResult:
        if self._lost is not None:
            raise self._lost
        with self._reporting():
            self._flight.oldest.wait()  # Ctrl-C in here leaves the step in flight
            result = self._flight.take().result()
        if len(self._flight):
            self._flight.oldest.inherit_failures(result)
        self._steps += 1
        return result

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    @property
    def block_layout(self) -> str:
        return self._kv.layout

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        with self._reporting():
            return self._moves.read(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        with self._reporting():
            self._moves.write(blocks, contents)

    def capture_graphs(self, draft_tokens: int = 0) -> None:
        """Captures graphs of every bucket of rows for decode steps (one token per sequence, and
        drafts), in which a server spends most of its time. Computes only padding, which writes to
        no block."""
        most = min(GRAPH_ROWS, self._limits.max_batch_tokens)
        shapes = [
            self._inputs.shape_of(1, rows)
            for rows in row_buckets(most)
            if rows <= self._limits.max_sequences
        ]
        shapes += dict.fromkeys(
            self._inputs.shape_of(1 + drafts, rows)
            for rows in row_buckets(min(most, DRAFT_GRAPH_ROWS))
            for drafts in range(1, min(draft_tokens, rows - 1) + 1)
        )
        for shape in reversed(shapes):
            self._inputs.clear(shape)
            self._graphs.capture(shape, partial(self._launch_body, shape))
        if not self._spec.has_head:
            return
        self._sampler.warm_up(self._program.logits[:1])
        for rows in reversed(row_buckets(min(most, self._logit_rows))):
            self._graphs.capture(rows, partial(self._launch_head, rows))
            for is_adjusted in (False, True):
                launch = partial(self._launch_draws, rows, is_adjusted)
                self._graphs.capture(("draws", rows, is_adjusted), launch)

    def close(self) -> None:
        """Free the device's memory; results that were not collected are lost."""
        if self._closed:
            return
        self._closed = True
        self._flight.close()
        if self._cuda and self._lost is None:
            torch.cuda.synchronize(self._device)
        for name in (
            "_landings",
            "_graphs",
            "_pooling",
            "_program",
            "_sampler",
            "_inputs",
            "_moves",
            "_kv",
            "_weights",
        ):
            self.__dict__.pop(name, None)
        if self._cuda and self._lost is None:
            torch.cuda.empty_cache()

    # -- one step ----------------------------------------------------------------------------------

    def _compute(self, step: StepInFlight) -> None:
        plan, wanted = step.plan, step.wanted
        step.began()
        if plan.copies:
            self._kv.copy(plan.copies)
        if not len(plan):
            self._drawn_at = wanted.drawn_at
            step.ended()
            return
        shape = self._inputs.shape_of(max(plan.counts), self._padded(plan.batch_tokens))
        self._inputs.fill(plan, wanted.rows, step.continued, self._drawn_at, shape)
        # A step with drafts and no prompts comes as often as one that only decodes.
        at_once = shape.is_decode or (plan.drafts and plan.batch_tokens == len(wanted.rows))
        step.is_warm_up = not self._graphs.run(
            shape, lambda: self._launch_body(shape), shape.rows, at_once=bool(at_once)
        )
        if self._pooling is not None:
            self._pooling.add(step)
        step.sampling()
        tops: list[Tops] = []
        if not self._spec.has_head:
            pass  # the last stage draws
        elif len(wanted.rows) <= self._logit_rows:
            tops += self._draw(step)
        else:
            tops += self._draw_in_pieces(wanted)
        if self._ranks is not None and self._limits.steps_in_flight > 1:
            tokens = self._sampler.tokens  # which the next step may continue
            found = self._ranks.first(tokens)
            if found is not tokens:
                tokens.copy_(found)
        self._drawn_at = wanted.drawn_at
        step.fetch(self._sampler.results, tops)
        step.ended()

    def _launch_body(self, shape: StepShape) -> None:
        self._inputs.launch(shape, self._sampler.tokens)
        self._program.run_body(shape)

    def _launch_head(self, rows: int) -> None:
        self._sampler.launch(self._program.run_head(rows, self._inputs.wanted))

    def _launch_draws(self, rows: int, is_adjusted: bool) -> None:
        self._sampler.launch_draws(self._program.logits[:rows], is_adjusted)

    def _draw(self, step: StepInFlight) -> Iterator[Tops]:
        wanted = step.wanted
        if not len(wanted.rows):
            return
        rows = row_bucket(len(wanted.rows), self._logit_rows)
        is_known = self._graphs.run(rows, lambda: self._launch_head(rows), rows)
        logits = self._program.logits[: len(wanted.rows)]
        if len(wanted.sampled):
            is_adjusted = self._sampler.prepare_draws(
                wanted, logits, self._inputs.wanted, self._inputs.tokens
            )
            is_known &= self._graphs.run(
                ("draws", rows, is_adjusted), lambda: self._launch_draws(rows, is_adjusted), rows
            )
        step.is_warm_up |= not is_known
        if not wanted.is_drawn_only:
            found = self._sampler.finish(wanted, logits)
            if found is not None:
                yield found

    def _draw_in_pieces(self, wanted: Wanted) -> Iterator[Tops]:
        """For steps that want more rows than fit into the logits buffer: scored prompts."""
        rows = self._sampler.send(wanted.rows)
        for offset in range(0, len(wanted.rows), self._logit_rows):
            some = rows[offset : offset + self._logit_rows]
            logits = self._program.run_head(len(some), some)
            self._sampler.launch(logits, offset)
            if wanted.draws_within(offset, offset + len(some)):
                is_adjusted = self._sampler.prepare_draws(
                    wanted, logits, some, self._inputs.tokens, offset
                )
                self._sampler.launch_draws(logits, is_adjusted, offset)
            found = self._sampler.finish(wanted, logits, offset)
            if found is not None:
                yield found

    def _padded(self, rows: int) -> int:
        return row_bucket(rows, self._limits.max_batch_tokens)

    # -- checks ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """On the runner's stream."""
        on_stream = (
            contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        with self._reporting(), on_stream, torch.inference_mode():
            yield

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """An error of the device makes this runner unusable: its memory can't be trusted any more,
        and every further call fails too."""
        try:
            yield
        except HeadraceError:
            raise
        except torch.cuda.OutOfMemoryError as error:
            self._lost = _lost(error, "Start with a smaller --max-batch-tokens or --gpu-memory.")
            raise self._lost from error
        except RuntimeError as error:
            if not self._cuda:
                raise
            self._lost = _lost(error, "Restart the engine.")
            raise self._lost from error


def has_dependent_launches(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch; the interpreter does not."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= DEPENDENT_CAPABILITY


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _lost(error: Exception, remedy: str) -> DeviceLostError:
    first_line = str(error).strip().split("\n")[0]
    return DeviceLostError(f"The GPU failed: {type(error).__name__}: {first_line}", remedy)

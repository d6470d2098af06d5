"""/metrics: what metrics.py counted, as Prometheus (or OpenMetrics, if asked for) text.

Every name starts with `headrace:`; where vLLM has the same metric, it is given under vLLM's name
too, so that dashboards, autoscalers and routers made for vLLM read it unchanged. The only file that
knows metric names; it counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.server.edge.room import DROPS
from headrace.server.observe.families import FamilyMaker, Labels
from headrace.server.observe.metrics import STEP_PARTS, Metrics
from headrace.server.observe.text_format import TextWriter, choose_format

# Outcomes of grammars, as server/grammars/places.py counts them: present from the start, so that
# rates are right.
OUTCOMES = ("compiled", "reused", "refused", "refused_again", "busy", "timeout", "killed")


class Exposition:
    """Made once; `write` answers a scrape."""

    def __init__(
        self, metrics: Metrics, model_name: str, build: Callable[[], Labels], *others: Collector
    ) -> None:
        # A separate registry: without what other code in this process registers globally.
        self._registry = CollectorRegistry()
        for collector in (_Families(metrics, model_name, build), *others):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._writer = TextWriter()

    def write(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type, chosen by the Accept header."""
        chosen = choose_format(accept)
        families = self._registry.collect()
        return self._writer.write(families, is_open=chosen.is_open), chosen.content_type


class _Families(Collector):
    def __init__(self, metrics: Metrics, model_name: str, build: Callable[[], Labels]) -> None:
        self._metrics = metrics
        self._make = FamilyMaker(model_name)
        self._build = build

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is collected just to be registered

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._times()
        yield from self._cache()
        yield from self._engine()
        yield from self._prefix_disk()
        yield from self._speculation()
        yield from self._handovers()
        yield from self._grammars()
        yield from self._http()
        yield from self._facts()

    def _requests(self) -> Iterator[Metric]:
        m, make = self._metrics, self._make
        yield from make.gauge(
            "num_requests_running", "Requests that the engine has started.", m.running_requests
        )
        yield from make.gauge(
            "num_requests_waiting", "Requests waiting for the engine.", m.waiting_requests
        )
        yield from make.counter(
            "prompt_tokens",
            "Prompt tokens of started requests, including cached ones.",
            m.prompt_tokens,
        )
        cached = m.cached_prompt_tokens
        yield from make.counter(
            "prompt_tokens_cached",
            "Prompt tokens of started requests that were in the prefix cache.",
            cached,
        )
        yield from make.counter(
            "prompt_tokens_by_source",
            "Prompt tokens of started requests, by source: to be computed, or in the prefix cache.",
            [
                ({"source": "local_compute"}, m.prompt_tokens - cached),
                ({"source": "local_cache_hit"}, cached),
            ],
        )
        yield from make.counter("generation_tokens", "Tokens generated.", m.generation_tokens)
        yield from make.counter(
            "request_success",
            "Finished requests by reason (abort: the client disconnected; error: failed).",
            [({"finished_reason": reason}, n) for reason, n in m.finished.items()],
        )
        yield from make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", m.request_prompt_tokens
        )
        yield from make.histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not cached.",
            m.request_computed_tokens,
        )
        yield from make.histogram(
            "request_generation_tokens",
            "Tokens generated for a request.",
            m.request_generation_tokens,
        )
        yield from make.histogram(
            "request_max_num_generation_tokens",
            "Tokens of a request's longest continuation.",
            m.longest_answer_tokens,
        )
        yield from make.histogram(
            "request_params_max_tokens", "The max_tokens of a request.", m.params_max_tokens
        )
        yield from make.histogram("request_params_n", "The n of a request.", m.params_n)

    def _times(self) -> Iterator[Metric]:
        m, make = self._metrics, self._make
        yield from make.histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token (chunks without tokens don't count).",
            m.ttft,
        )
        yield from make.histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first: (last - first) / (n - 1).",
            m.tpot,
        )
        yield from make.histogram(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of a request.",
            m.token_gap,
            # vLLM's deprecated name for this; older dashboards use it.
            old_name="time_per_output_token_seconds",
        )
        yield from make.histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its end.", m.e2e
        )
        yield from make.histogram(
            "request_queue_time_seconds",
            "Time in the queue before the engine started the request.",
            m.queue,
        )
        yield from make.histogram(
            "request_prefill_time_seconds",
            "Time from leaving the queue to the first token.",
            m.prefill,
        )
        yield from make.histogram(
            "request_decode_time_seconds", "Time from the first token to the last.", m.decode
        )
        yield from make.histogram(
            "request_inference_time_seconds",
            "Time from leaving the queue to the last token.",
            m.inference,
        )

    def _cache(self) -> Iterator[Metric]:
        now, totals, make = self._metrics.snapshot, self._metrics.engine, self._make
        blocks = {
            "free": now.free_blocks if now else 0,
            "used": now.used_blocks if now else 0,
            "cached": now.cached_blocks if now else 0,
        }
        yield from make.gauge(
            "kv_cache_usage_perc",
            "Fraction of the KV blocks in use by sequences, 0 to 1.",
            blocks["used"] / max(sum(blocks.values()), 1),
            old_name="gpu_cache_usage_perc",
        )
        yield make.own_gauge(
            "kv_blocks",
            "KV blocks by state: free, used by sequences, or cached (a prefix that may be reused).",
            [({"state": state}, n) for state, n in blocks.items()],
        )
        yield from make.counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache; recomputation is not counted.",
            totals.total("prefix_queries_tokens"),
        )
        yield from make.counter(
            "prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            totals.total("prefix_hits_tokens"),
        )
        yield make.own_counter(
            "prefix_cache_misses",
            "Prefix cache lookups by the reason why the first missing block was not found.",
            [({"reason": r}, n) for r, n in totals.by_label("misses").items()],
        )
        yield make.own_counter(
            "cow_copies",
            "Shared KV blocks copied before they were written to.",
            totals.total("cow_copies"),
        )

    def _prefix_disk(self) -> Iterator[Metric]:
        now, totals, make = self._metrics.snapshot, self._metrics.engine, self._make
        if now is None or now.prefix_disk is None:
            return
        yield make.own_counter(
            "prefix_disk_hits",
            "Prompt tokens loaded from the prefix cache on disk; they count as hits of the prefix "
            "cache too.",
            totals.total("prefix_disk_hits_tokens"),
        )
        yield make.own_gauge(
            "prefix_disk_stored_bytes",
            "Size of the prefix cache on disk, with the files of all models in its folder.",
            now.prefix_disk.stored_bytes,
        )
        for name, label, help_text in (
            ("bytes", "direction", "Bytes of KV blocks read from and written to the disk."),
            (
                "blocks",
                "outcome",
                "KV blocks loaded from disk, written, dropped (the queue was full, or the disk "
                "failed), or evicted.",
            ),
            (
                "failures",
                "kind",
                "Failed reads and writes of the prefix cache on disk, corrupt files, and loads "
                "that took too long.",
            ),
        ):
            counts = totals.by_label(f"prefix_disk_{name}")
            yield make.own_counter(
                f"prefix_disk_{name}", help_text, [({label: key}, n) for key, n in counts.items()]
            )

    def _engine(self) -> Iterator[Metric]:
        m, now, make = self._metrics, self._metrics.snapshot, self._make
        total, step_s = m.engine.total, m.engine.by_label("step_s")
        yield make.own_gauge("engine_up", "1 if the engine is ready, else 0.", m.engine_is_up)
        yield make.own_counter(
            "engine_restarts", "Restarts of the engine process.", m.engine_restarts
        )
        yield from make.counter(
            "num_preemptions",
            "Sequences preempted because KV blocks ran out.",
            total("preemptions"),
        )
        yield make.own_counter(
            "preempted_tokens", "Computed tokens lost to preemption.", total("preempted_tokens")
        )
        yield make.own_counter(
            "sequences_gave_way",
            "Sequences preempted in favour of another key's, for a fair share.",
            total("gave_way"),
        )
        yield make.own_counter(
            "computed_prompt_tokens",
            "Prompt tokens computed: cached ones don't count, recomputed ones count again.",
            total("computed_prompt_tokens"),
        )
        yield make.own_counter("steps", "Steps computed.", total("steps"))
        yield from make.histogram(
            "iteration_tokens_total",
            "Tokens per step: prompt tokens computed and tokens generated.",
            m.engine.step_tokens(),
        )
        yield make.own_counter(
            "step_seconds",
            "Time spent in steps, by part.",
            [({"part": part}, step_s.get(part, 0.0)) for part in STEP_PARTS],
        )
        yield make.own_gauge(
            "sequences",
            "The engine's sequences by state: a request has n; preempted ones are waiting.",
            [
                ({"state": "running"}, now.running_sequences if now else 0),
                ({"state": "waiting"}, now.waiting_sequences if now else 0),
            ],
        )
        yield make.own_gauge(
            "waiting_prompt_tokens",
            "Prompt tokens of waiting sequences.",
            now.waiting_tokens if now else 0,
        )
        yield make.own_gauge(
            "engine_resident_memory_bytes",
            "Resident memory of the engine process.",
            now.resident_bytes if now else 0,
        )

    def _speculation(self) -> Iterator[Metric]:
        engine, make = self._metrics.engine, self._make
        yield from make.counter(
            "spec_decode_num_drafts",
            "Drafts that were checked: of one sequence in one step.",
            engine.total("drafts"),
        )
        yield from make.counter(
            "spec_decode_num_draft_tokens",
            "Tokens that were guessed and checked.",
            engine.total("draft_tokens"),
        )
        yield from make.counter(
            "spec_decode_num_accepted_tokens",
            "Guessed tokens that were right.",
            engine.total("accepted_tokens"),
        )
        yield from make.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place in the draft.",
            [({"position": place}, n) for place, n in engine.by_label("accepted_at").items()],
        )
        yield make.own_counter(
            "drafting_seconds",
            "Time spent on guessing tokens; a part of the steps' schedule time.",
            engine.total("drafting_s"),
        )

    def _handovers(self) -> Iterator[Metric]:
        engine, make = self._metrics.engine, self._make
        outcomes = {"whole": 0.0} | engine.by_label("handovers")
        yield make.own_counter(
            "handovers",
            "Prompts whose blocks were fetched from, or given to, another engine, by outcome.",
            [({"outcome": outcome}, n) for outcome, n in outcomes.items()],
        )
        yield make.own_counter(
            "handover_bytes",
            "Bytes of blocks that were handed over.",
            engine.total("handover_bytes"),
        )
        yield make.own_counter(
            "handover_seconds",
            "Time of all hand-overs together, computing the prompts included.",
            engine.total("handover_s"),
        )
        yield make.own_counter(
            "handover_skipped",
            "Prompts with too few missing tokens to be fetched.",
            engine.total("handover_skipped"),
        )

    def _grammars(self) -> Iterator[Metric]:
        m, now, make = self._metrics, self._metrics.snapshot, self._make
        outcomes = dict.fromkeys(OUTCOMES, 0.0) | m.engine.by_label("grammars")
        yield make.own_counter(
            "grammars",
            "Requests with a grammar, by the result of compiling it.",
            [({"outcome": outcome}, n) for outcome, n in outcomes.items()],
        )
        yield make.own_counter(
            "grammar_seconds",
            "CPU time spent compiling and following grammars.",
            m.engine.total("grammar_s"),
        )
        yield make.own_gauge(
            "grammar_processes",
            "Processes that hold a grammar.",
            now.grammar_processes if now else 0,
        )
        yield make.own_gauge(
            "grammar_memory_bytes",
            "Memory of the grammar processes.",
            now.grammar_bytes if now else 0,
        )

    def _http(self) -> Iterator[Metric]:
        m, make = self._metrics, self._make
        yield make.own_counter(
            "http_requests",
            "HTTP requests by route and status; 499: the client left first; other: unknown paths.",
            [
                ({"route": route, "status": str(status)}, n)
                for (route, status), n in m.answered.items()
            ],
        )
        yield make.own_counter(
            "rejected_requests",
            "Requests refused, by reason.",
            [({"reason": reason}, n) for reason, n in m.refused.items()],
        )
        yield make.own_gauge("connections", "Open connections.", m.edge.open_connections())
        yield make.own_counter(
            "connections_dropped",
            "Connections dropped without an answer, by reason.",
            [({"reason": reason}, m.edge.dropped.get(reason, 0)) for reason in DROPS],
        )
        yield make.own_gauge(
            "body_bytes", "Bytes of request bodies being read.", m.edge.bodies.bytes
        )
        yield make.own_counter(
            "refused_bounds",
            "Requests refused because a list or text is too long, by the bound (docs/bounds.md).",
            [({"bound": bound}, n) for bound, n in m.refused_bounds.items()],
        )

    def _facts(self) -> Iterator[Metric]:
        make, facts = self._make, self._metrics.engine_facts
        yield make.own_gauge(
            "build_info", "Version and fingerprint of this server.", [(self._build(), 1)]
        )
        if facts is None:
            return
        yield make.own_gauge(
            "memory_ledger_bytes",
            "The engine's memory by part: as predicted before loading, and as allocated.",
            [
                ({"part": part, "kind": kind}, n)
                for kind, parts in facts.ledger_bytes.items()
                for part, n in parts.items()
            ],
        )
        pool = {
            "block_size": str(facts.block_tokens),
            "num_gpu_blocks": str(facts.total_blocks),
            "max_model_len": str(facts.context_tokens),
            "max_num_seqs": str(facts.max_sequences),
        }
        yield from make.gauge(
            "cache_config_info",
            "The KV pool, with vLLM's label names on every device.",
            [(pool, 1)],
        )

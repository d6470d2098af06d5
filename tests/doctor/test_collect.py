"""From fake engines over HTTP to observations: settings of each engine, bad endpoints, probes and
their budget, Prometheus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.doctor.fakes import MODELS, FakeEngine, Script, Values, render, serving

from headrace.core.errors import ConfigError
from headrace.doctor.collect import Wanted, observe
from headrace.doctor.endpoint import Endpoint, EndpointError, key_from
from headrace.doctor.local import read_gpus, read_links
from headrace.doctor.names import ENGINES, VLLM
from headrace.doctor.observation import Observation
from headrace.doctor.probe import Prober
from headrace.doctor.probe_plan import Plan, fitted
from headrace.doctor.prometheus import readings

READ_ONLY = Wanted(interval_s=0.0, probes=False)
SMALL = Plan(
    repeats=2, answer_tokens=4, medium_tokens=64, long_tokens=128, long_repeats=1,
    prefix_tokens=64, prefix_pairs=2, concurrency=3, bursts=1, burst_tokens=4, stream_tokens=8,
    compared=1,
)  # fmt: skip
IDLE = Values(levels={"running": 0, "waiting": 0}, counters={"generation_tokens": 0})


def seen(engine: FakeEngine, wanted: Wanted = READ_ONLY) -> Observation:
    with serving(engine) as endpoint:
        return observe(endpoint, wanted)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "vllm": ({"/version": {"version": "0.32.0"}}, {"context_tokens": 8192}),
    "sglang": (
        {"/get_server_info": {
            "context_length": 32768, "max_running_requests": 48, "max_total_num_tokens": 500_000,
            "chunked_prefill_size": 8192, "mem_fraction_static": 0.88, "tp_size": 2,
            "disable_radix_cache": True, "disable_cuda_graph": False, "dtype": "bfloat16",
            "kv_cache_dtype": "auto", "page_size": 1, "version": "0.5.23"}},
        {"context_tokens": 32768, "max_sequences": 48, "kv_tokens": 500_000,
         "max_batch_tokens": 8192, "tensor_parallel": 2, "prefix_cache": False, "eager": False,
         "dtype": "bfloat16", "static_memory": 0.88},
    ),
    "tgi": (
        {"/info": {"model_id": "m", "model_dtype": "torch.bfloat16", "version": "3.3.7",
                   "max_concurrent_requests": 128, "max_total_tokens": 8192,
                   "max_batch_total_tokens": 16384, "max_batch_size": None}},
        {"context_tokens": 8192, "kv_tokens": 16384, "max_waiting": 128, "dtype": "bfloat16"},
    ),
    "llama.cpp": (
        {"/props": {"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4,
                    "model_path": "m.gguf", "build_info": "b10586-abc"},
         "/slots": [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]},
        {"context_tokens": 4096, "max_sequences": 4, "kv_tokens": 16384, "reserves_context": True},
    ),
    "headrace": (
        {"/version": {
            "version": "0.1.0", "fingerprint": "hr-1", "context_tokens": 8192, "kv_tokens": 16384,
            "max_batch_tokens": 512, "max_step_growth": 2.0,
            "identity": {"backend": {"name": "cpu"}, "kv_dtype": "f16",
                         "quantization": {"Q4_1": 0.8, "F32": 0.2}},
            "config": {"engine": {"max_sequences": 1, "prefix_cache": True,
                                  "quantization": "none", "max_step_growth": None},
                       "server": {"max_waiting_requests": 256}}}},
        {"context_tokens": 8192, "kv_tokens": 16384, "max_sequences": 1, "max_waiting": 256,
         "kv_dtype": "f16", "device": "cpu", "quantization": "Q4_1", "prefix_cache": True,
         "max_batch_tokens": 512, "max_step_growth": 2.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_an_engine_tells(name: str) -> None:
    paths, wanted = SETTINGS[name]
    names = next(each for each in ENGINES if each.engine == name)
    found = seen(FakeEngine([render(names, IDLE)], paths=paths | {"/v1/models": MODELS}))
    assert found.engine.name == name
    assert found.engine.version
    assert wanted.items() <= found.config.items()


def test_vllms_labels() -> None:
    info = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",cache_dtype="fp8",'
        'enable_prefix_caching="False",gpu_memory_utilization="0.95"} 1.0'
    )
    found = seen(FakeEngine([render(VLLM, replace(IDLE, info=info))]))
    assert found.config == {"block_tokens": 16, "kv_tokens": 16000, "prefix_cache": False,
                            "kv_dtype": "fp8", "gpu_memory": 0.95}  # fmt: skip


def test_ollama_has_no_metrics_and_tells_its_spill() -> None:
    paths = {
        "/api/version": {"version": "0.33.0"},
        "/api/ps": {"models": [{"name": "qwen3:8b", "size": 10_000, "size_vram": 6_000,
                                "context_length": 8192,
                                "details": {"quantization_level": "Q4_K_M"}}]},
    }  # fmt: skip
    found = seen(FakeEngine([], paths=paths))
    assert found.engine.name == "ollama"
    assert found.config["spilled_share"] == pytest.approx(0.4)
    assert "/metrics answers HTTP 404" in found.notes


def test_bad_endpoints_are_one_line_each() -> None:
    with pytest.raises(EndpointError, match="can't be reached"):
        observe(Endpoint("http://127.0.0.1:9", timeout_s=1), READ_ONLY)
    with pytest.raises(EndpointError, match="redirects to"):
        seen(FakeEngine(["x 1"], script=Script(redirects=True)))
    for url in ("ftp://x", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="URL"):
            Endpoint(url)
    html = seen(FakeEngine(["<html></html>"]))
    assert "/metrics is a web page, not metrics" in html.notes
    other = seen(FakeEngine(["node_load1 5\n"]))
    assert other.engine.name == ""
    assert any("no names of an engine" in note for note in other.notes)


def test_a_restart_between_the_readings_is_a_note() -> None:
    pages = [render(VLLM, Values(levels={"running": 1}, counters={"generation_tokens": n}))
             for n in (500, 20)]  # fmt: skip
    found = seen(FakeEngine(pages))
    assert found.was_restarted
    assert found.deltas["generation_tokens"] == 20
    assert any("restarted" in note for note in found.notes)


def test_keys_come_from_named_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    engine = FakeEngine([render(VLLM, IDLE)])
    with serving(engine) as endpoint:
        Endpoint(endpoint.url, key=key_from("SOME_KEY")).get("/metrics")
        Endpoint(endpoint.url, key=key_from(None)).get("/metrics")
    assert engine.keys == ["Bearer secret", None]
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        key_from("NO_SUCH_KEY")


def prober(endpoint: Endpoint, plan: Plan = SMALL) -> Prober:
    return Prober(endpoint, plan, model="m", seed=1)


def test_probes_of_every_kind() -> None:
    engine = FakeEngine([])
    with serving(engine) as endpoint:
        found = prober(endpoint).run()
    assert found.errors == ()
    assert found.skipped == {}
    counts = {
        name: len(getattr(found, name))
        for name in ("short", "medium", "long", "cold", "warm", "plain", "grammar",
                     "grammar_new", "penalty", "sizes")
    }  # fmt: skip
    assert counts == {"short": 2, "medium": 1, "long": 1, "cold": 2, "warm": 2, "plain": 1,
                      "grammar": 1, "grammar_new": 1, "penalty": 1, "sizes": 16}  # fmt: skip
    assert [len(burst) for burst in found.bursts] == [3]
    assert [a.cached_tokens for a in found.cold] == [0, 0]
    assert all((a.cached_tokens or 0) > 20 for a in found.warm)
    assert all(a.is_counted and a.tokens == 4 for a in found.short)
    # One warm-up request beside all of them, and the budget counts what the endpoint counted.
    prompts = [str(b.get("prompt") or b["messages"][-1]["content"]) for b in engine.asked]
    usage = [len(p.split()) + b["max_tokens"] for p, b in zip(prompts, engine.asked, strict=True)]
    assert found.spent_tokens == sum(usage)
    assert all(body["stream_options"] == {"include_usage": True} for body in engine.asked)


def test_the_plan_is_within_its_limits() -> None:
    assert Plan().tokens <= Plan().limit_tokens == 20_000
    assert Plan().limit_s == 60
    small = fitted(Plan(), 1024)
    assert small.long_tokens == 512
    assert small.concurrency == Plan().concurrency


def test_the_budget_of_tokens_holds() -> None:
    plan = replace(SMALL, limit_tokens=260)
    with serving(FakeEngine([])) as endpoint:
        found = prober(endpoint, plan).run()
    assert found.spent_tokens <= 260
    assert found.skipped
    assert all("260 tokens" in why for why in found.skipped.values())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(error="engine is dead"), "an error in the stream: engine is dead"),
        (Script(status=503), "HTTP 503: no luck"),
        (Script(cuts=True), "without a finish_reason"),
    ],
)
def test_errors_inside_streams_are_errors(script: Script, words: str) -> None:
    with serving(FakeEngine([], script=script)) as endpoint:
        found = prober(endpoint).run()
    assert found.errors
    assert all(words in error for error in found.errors)
    assert found.skipped["long"] == "short requests failed already"


def test_what_an_endpoint_refuses_is_left_out() -> None:
    script = Script(refuses=("response_format",))
    with serving(FakeEngine([], script=script)) as endpoint:
        found = prober(endpoint).run()
    assert "refuses" in found.skipped["grammar"]
    assert found.errors == ()
    assert len(found.plain) == 1


def test_without_usage_chunks_are_counted_and_that_is_said() -> None:
    with serving(FakeEngine([], script=Script(tells_usage=False))) as endpoint:
        found = prober(endpoint).run()
    assert [a.tokens for a in found.short] == [4, 4]
    assert not any(a.is_counted for a in found.short)


def test_an_endpoint_that_dies_in_the_middle_keeps_what_was_measured() -> None:
    engine = FakeEngine([])
    with serving(engine) as endpoint:

        def die(stage: str) -> None:
            if stage == "prefix":
                engine.script.status = 500

        found = Prober(endpoint, SMALL, model="m", seed=1, say=die).run()
    assert all(a.is_good for a in found.short)
    assert all(not a.is_good for a in found.cold)
    assert len(found.bursts) == 1


def test_prometheus_instead_of_metrics() -> None:
    series = [
        {"metric": {"__name__": "vllm:num_requests_running", "instance": "a"}, "value": [1, "3"]},
        {"metric": {"__name__": "vllm:num_requests_running", "instance": "b"}, "value": [1, "0"]},
        {"metric": {"__name__": "vllm:num_requests_waiting", "instance": "a"}, "value": [1, "9"]},
        {"metric": {"__name__": "vllm:num_requests_waiting", "instance": "b"}, "value": [1, "0"]},
    ]

    class Any200(dict[str, Any]):
        def __contains__(self, path: object) -> bool:
            return str(path).startswith("/api/v1/query?")

        def __getitem__(self, path: str) -> Any:
            return {"status": "success", "data": {"result": series}}

    engine = FakeEngine([])
    engine.paths = Any200()
    with serving(engine) as endpoint:
        found = readings(endpoint, interval_s=60)
    assert len(found) == 5
    assert found[-1].at_s - found[0].at_s == pytest.approx(60)
    assert [(r.name, r.waiting) for r in found[-1].replicas] == [("a", 9), ("b", 0)]
    with (
        serving(FakeEngine([], paths={})) as nothing,
        pytest.raises(EndpointError, match="HTTP 404"),
    ):
        readings(nothing, interval_s=60)


def test_nvidia_smi() -> None:
    (gpu,) = read_gpus("NVIDIA H100 80GB HBM3, 70000, 81559, 93\n")
    assert gpu.busy_share == 0.93
    assert gpu.memory_bytes == 81559 * 2**20
    (dark,) = read_gpus("NVIDIA GB10, [N/A], [N/A], [N/A]\n")
    assert dark.busy_share is None
    two = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{0}\t0-1\nGPU1\t{0}\t X \t0-1\n"
    assert read_links(two.format("NV18")) == "nvlink"
    assert read_links(two.format("PHB")) == "pcie"
    assert read_links("\tGPU0\nGPU0\t X \t0-1\n") is None

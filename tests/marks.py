"""What is slow: `pytest -m "not slow"` (`make quick`) leaves it out, `make test` runs it.

A test is slow if its file is below one of PATHS, if it needs one of FIXTURES, or if it is marked
`builds`: those take many minutes, and only `make test-slow` runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PATHS = (
    # Processes: servers, commands, documents that are run, benchmarks.
    "tests/attacks",
    "tests/bench/test_compare.py",
    "tests/bench/test_interval.py",
    "tests/bench/test_session.py",
    "tests/bench/test_traps.py",
    "tests/benchmarks",
    "tests/cli/test_batch.py",
    "tests/cli/test_commands.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_end_to_end.py",
    "tests/cli/test_fit.py",
    "tests/cli/test_input.py",
    "tests/cli/test_models.py",
    "tests/cli/test_fit_stages.py",
    "tests/cli/test_simulate.py",
    "tests/cli/test_simulate_gpu.py",
    "tests/cli/test_plan.py",
    "tests/cli/test_profile.py",
    "tests/calibrate/test_operations.py",
    "tests/core/test_collector.py",
    "tests/deploy",
    "tests/doctor/test_matrix.py",
    "tests/doctor/test_pathologies.py",
    "tests/dialects/test_foreign_words.py",
    "tests/dialects/test_real_parsers.py",
    "tests/fetch/test_catalog.py",
    "tests/fetch/test_pull_parts.py",
    "tests/parallel/test_processes.py",
    "tests/ray_serve/test_child.py",
    "tests/ray_serve/test_cluster.py",
    "tests/replicas/test_life.py",
    "tests/replicas/test_rolling.py",
    "tests/replicas/test_served.py",
    "tests/server/access/test_operators.py",
    "tests/server/edge/test_app.py",
    "tests/server/edge/test_room.py",
    "tests/server/grammars/test_process.py",
    "tests/server/handover/test_same_answers.py",
    "tests/server/handover/test_servers.py",
    "tests/server/link/test_processes.py",
    "tests/server/link/test_supervisor.py",
    "tests/server/start/test_serve_command.py",
    "tests/server/start/test_verified.py",
    "tests/test_documents_run.py",
    "tests/test_leaving.py",
    "tests/test_marks.py",
    "tests/test_sdist.py",
    # Compilers, and Triton's interpreter.
    "tests/backends/cuda",
    "tests/compilers",
    # Long runs, and properties with many examples.
    "tests/backends/cpu/test_sampling.py",
    "tests/backends/reference/test_sampling.py",
    "tests/backends/shared/test_boundary.py",
    "tests/backends/shared/test_recorder.py",
    "tests/backends/test_backend.py",
    "tests/backends/test_drafts.py",
    "tests/engine/test_adoption.py",
    "tests/engine/test_fetching.py",
    "tests/engine/test_long_runs.py",
    "tests/engine/test_properties.py",
    "tests/engine/test_same_tokens.py",
    "tests/engine/test_speculation.py",
    "tests/engine/test_turns.py",
    "tests/grammar/test_look_ahead.py",
    "tests/grammar/test_matches.py",
    "tests/models/test_closed_form.py",
    "tests/models/test_known_parameters.py",
    "tests/search/test_planner.py",
    "tests/server/request/test_pieces.py",
    "tests/simulate/test_fleet.py",
    "tests/simulate/test_lean.py",
    "tests/simulate/test_replica.py",
    "tests/simulate/test_report.py",
    "tests/tokenizer/test_template_limits.py",
    "tests/weights/files/test_gguf_fuzz.py",
    "tests/weights/files/test_safetensors_fuzz.py",
    # The default model in this process.
    "tests/test_assemble.py",
    "tests/test_async_engine.py",
    "tests/test_llm.py",
    "tests/test_llm_guesses.py",
    "tests/test_llm_sampling.py",
    # Comparisons with transformers and torch.
    "tests/models/families",
    "tests/models/test_counting.py",
    "tests/models/test_embeddings.py",
    "tests/models/test_rope.py",
    "tests/tokenizer/test_chat_template.py",
    "tests/tokenizer/test_gguf_vocabulary.py",
    "tests/tokenizer/test_tokenizer.py",
    "tests/weights/methods",
    "tests/weights/test_sampling_defaults.py",
    "tests/server/api/test_guesses_api.py",
    "tests/server/api/test_schemathesis.py",
    "tests/server/start/test_fingerprint.py",
)
FIXTURES = frozenset({"start_server"})  # a server with the default model

_PLACES = tuple(ROOT / path for path in PATHS)


def is_slow(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in _PLACES)


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        if is_slow(item.path) or fixtures & FIXTURES or item.get_closest_marker("builds"):
            item.add_marker("slow")


def leaves_out(config: pytest.Config, path: Path) -> bool:
    """A quick run does not even import what it would deselect: some imports take seconds."""
    return config.getoption("markexpr") == "not slow" and is_slow(path)

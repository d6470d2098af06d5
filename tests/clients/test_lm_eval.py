"""lm-eval against completions and chats, on a task of this folder: nothing comes from a hub."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.clients.conftest import MODEL, Servers
from tests.clients.environments import environment
from tests.clients.programs import run_program

QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin", " Madrid"], 0),
    ("Two and two make", [" seven", " four", " nine"], 1),
    ("Water is made of hydrogen and", [" iron", " gold", " oxygen"], 2),
]
CHOICES = """\
task: headrace_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WRITING = """\
task: headrace_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> Path:
    """A folder of tasks, with their questions beside it."""
    data = folder / "questions.jsonl"
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "choices.yaml").write_text(CHOICES.format(data=data))
    (tasks / "writing.yaml").write_text(WRITING.format(data=data))
    return tasks


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def evaluate(
    model: str, task: str, arguments: str, tasks: Path, variables: dict[str, str], *more: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results of a task, and its samples in the order of the questions."""
    command: list[str | Path] = [environment("lm-eval").program("lm_eval"), "--model", model]
    command += ["--model_args", arguments, "--tasks", task, "--include_path", str(tasks)]
    out = tasks.parent / "out"
    command += ["--output_path", str(out), "--log_samples", *more]
    run_program(command, tasks.parent, {**variables, "OPENAI_API_KEY": "none"})
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    found = json.loads(results.read_text())["results"][task]
    return found, sorted(rows, key=lambda row: int(row["doc_id"]))


def likelihood(base_url: str, context: str, continuation: str) -> float:
    """Of the same continuation, asked for by hand."""
    asked = {"model": MODEL, "prompt": context + continuation, "echo": True, "max_tokens": 0}
    answer = httpx.post(f"{base_url}/v1/completions", json={**asked, "logprobs": 1}, timeout=60)
    scores = answer.json()["choices"][0]["logprobs"]
    places = zip(scores["text_offset"], scores["token_logprobs"], strict=True)
    return sum(float(score) for place, score in places if place >= len(context))


def test_choices_are_scored(servers: Servers, variables: dict[str, str], tasks: Path) -> None:
    """With the server's own tokenizer, which lm-eval finds by itself (/tokenizer_info)."""
    url = servers.open.base_url
    arguments = f"model={MODEL},base_url={url}/v1/completions,tokenized_requests=True,max_retries=1"
    found, rows = evaluate(
        "local-completions", "headrace_choices", arguments, tasks, variables, "--verbosity", "INFO"
    )
    right = 0
    for (question, choices, answer), row in zip(QUESTIONS, rows, strict=True):
        scores = [float(score) for ((score, _),) in row["resps"]]
        for choice, score in zip(choices, scores, strict=True):
            assert math.isclose(score, likelihood(url, question, choice), abs_tol=1e-3)
        right += scores.index(max(scores)) == answer
    assert math.isclose(found["acc,none"], right / len(QUESTIONS))


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_answers_are_written(
    servers: Servers, variables: dict[str, str], tasks: Path, model: str
) -> None:
    path = "chat/completions" if "chat" in model else "completions"
    url = f"{servers.open.base_url}/v1/{path}"
    arguments = f"model={MODEL},base_url={url},tokenizer_backend=None,tokenized_requests=False"
    more = ("--apply_chat_template",) if "chat" in model else ()
    _, rows = evaluate(model, "headrace_writing", arguments, tasks, variables, *more)
    assert len(rows) == len(QUESTIONS)
    for row in rows:
        ((text,),) = row["resps"]
        assert "\n" not in text

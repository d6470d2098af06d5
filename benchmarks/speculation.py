"""Tokens a second with speculation beside none, in turns, and what the step curve predicts.

    python benchmarks/speculation.py [--model M] [--speculate auto] [--streams 1 16 32] [--rounds 3]

Each round runs every workload (speculation_workloads.py) with both engines at once, which take
turns of a quarter of a second: so a machine whose speed changes by the minute is unfair to none. An
engine's time is that of its turns. A round has a key of its own: otherwise the answers of the round
before would be found in the pool, and every guess would be right. The answers of both must be the
same, token by token; a difference is reported and is an error. The prediction is made from what the
engine has learnt: the steps of the plain run at their learnt time, against the steps with guesses
at theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.engine.stats import EngineStats
from headrace.speculate.speculator import TimedSpeculator
from headrace.speculate.step_curve import GUESS_ATTENDS
from speculation_turns import Turns, take_turns
from speculation_workloads import WORKLOADS, Conversation, Workload

# A run has so many tokens at least, so that it takes some seconds: other conversations follow.
LEAST_TOKENS_ALONE, LEAST_TOKENS = 1280, 6400

Counts = tuple[int, int, int, int]  # steps, drafts, tokens of drafts, right ones


@dataclass(slots=True)
class Run:
    """One workload with one engine."""

    seconds: float = 0.0  # of generating answers to prompts that are in the prefix cache
    tokens: int = 0
    contexts: list[float] = field(default_factory=list)  # mean tokens before those of an answer
    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def count(self, before: Counts, after: Counts) -> None:
        steps, drafts, draft_tokens, accepted_tokens = (
            now - then for now, then in zip(after, before, strict=True)
        )
        self.steps += steps
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens


def run(
    llm: LLM, workload: Workload, streams: int, temperature: float, salt: str, turns: Turns
) -> Run:
    """`turns` are those of the engine, which it takes with its steps."""
    done = Run()
    turns_each = len(workload.conversation(0).turns)
    least = LEAST_TOKENS_ALONE if streams == 1 else LEAST_TOKENS
    batches = -(-least // (streams * turns_each * workload.answer_tokens))
    for batch in range(batches):
        first = batch * streams
        several = [workload.conversation(first + stream) for stream in range(streams)]
        # A key of its own: the same question comes again, and its answer is not to be found.
        own = f"{salt} {batch}"
        _converse(llm, several, workload.answer_tokens, temperature, own, turns, done)
    return done


def _converse(
    llm: LLM,
    conversations: list[Conversation],
    answer_tokens: int,
    temperature: float,
    salt: str,
    turns: Turns,
    done: Run,
) -> None:
    """Conversations side by side, one for each stream."""
    texts = [""] * len(conversations)
    params = SamplingParams(
        temperature=temperature, max_tokens=answer_tokens, seed=1, top_p=1.0, top_k=0
    )
    for turn in range(len(conversations[0].turns)):
        prompts = [each.turns[turn](text) for each, text in zip(conversations, texts, strict=True)]
        # Prompts are computed before: what is measured are answers.
        _generate(llm, conversations, prompts, replace(params, max_tokens=1), salt)
        before = _counts(llm.stats)
        with turns.measured() as took:
            outputs = _generate(llm, conversations, prompts, params, salt)
        done.seconds += took.seconds
        done.count(before, _counts(llm.stats))
        for stream, output in enumerate(outputs):
            best = output.outputs[0]
            texts[stream] = prompts[stream] + best.text
            done.answers.append(list(best.token_ids))
            done.tokens += len(best.token_ids)
            done.contexts.append(len(output.prompt_token_ids) + len(best.token_ids) / 2)


def _generate(
    llm: LLM,
    conversations: list[Conversation],
    prompts: list[str],
    params: SamplingParams,
    salt: str,
) -> list[Any]:
    """Encoded as a template is: the markers of turns are control tokens."""
    ids = [llm.tokenizer.encode_template(prompt) for prompt in prompts]
    grammars = {each.grammar for each in conversations}
    if len(grammars) == 1:
        return llm.generate(ids, params, grammar=grammars.pop(), cache_salt=salt)
    raise SystemExit("the streams of a workload must share their grammar")


def _counts(stats: EngineStats) -> Counts:
    drafts = stats.drafts
    return stats.steps, drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens


def predicted_gain(curve: TimedSpeculator, plain: Run, guessed: Run, streams: int) -> float | None:
    """From the learnt curve: as many steps as each run took, at the mean number of drawn tokens."""
    if not guessed.steps or not plain.steps:
        return None
    rows = min(streams, max(1, round(plain.tokens / plain.steps)))
    more = guessed.draft_tokens / guessed.steps
    context = statistics.mean(plain.contexts)
    before_s = curve.curve.step_s(rows, rows * context)
    after_s = curve.curve.step_s(round(rows + more), (rows + GUESS_ATTENDS * more) * context)
    if before_s is None or after_s is None:
        return None
    return plain.steps * before_s / (guessed.steps * after_s)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    shared = {"device": args.device, "threads": args.threads, "kv_tokens": args.kv_tokens}
    off = LLM(args.model, speculate="off", **shared)
    on = LLM(args.model, speculate=args.speculate, **shared)
    chosen = [each for each in WORKLOADS if not args.workload or each.name in args.workload]
    rows: list[dict[str, Any]] = []
    for streams in args.streams:
        for workload in chosen:
            runs: dict[str, list[Run]] = {"off": [], "on": []}
            for at in range(args.rounds):
                salt = f"{workload.name} {streams} {at}"
                both = take_turns(
                    {
                        name: (
                            llm,
                            partial(run, llm, workload, streams, args.temperature, salt),
                        )
                        for name, llm in (("off", off), ("on", on))
                    }
                )
                for name, done in both.items():
                    runs[name].append(done)
            rows.append(_row(workload, streams, runs, _speculator(on)))
            print(_line(rows[-1]), flush=True)
    return rows


def _speculator(llm: LLM) -> TimedSpeculator | None:
    found = llm._assembled.speculator
    return found if isinstance(found, TimedSpeculator) else None


def _row(
    workload: Workload, streams: int, runs: dict[str, list[Run]], curve: TimedSpeculator | None
) -> dict[str, Any]:
    plain, guessed = runs["off"], runs["on"]
    gains = [
        b.tokens / b.seconds / (a.tokens / a.seconds) for a, b in zip(plain, guessed, strict=True)
    ]
    last = guessed[-1]
    predicted = None if curve is None else predicted_gain(curve, plain[-1], last, streams)
    return {
        "workload": workload.name,
        "streams": streams,
        "off_tokens_s": statistics.median(each.tokens / each.seconds for each in plain),
        "on_tokens_s": statistics.median(each.tokens / each.seconds for each in guessed),
        "gain": statistics.median(gains),
        "gains": gains,
        "predicted_gain": predicted,
        "tokens": last.tokens,
        "drafts": last.drafts,
        "draft_tokens": last.draft_tokens,
        "accepted_tokens": last.accepted_tokens,
        "same_answers": all(a.answers == b.answers for a, b in zip(plain, guessed, strict=True)),
    }


def _line(row: dict[str, Any]) -> str:
    predicted = row["predicted_gain"]
    right = row["accepted_tokens"] / row["draft_tokens"] if row["draft_tokens"] else 0.0
    return (
        f"{row['workload']:<11}{row['streams']:>3} streams  {row['off_tokens_s']:7.1f} → "
        f"{row['on_tokens_s']:7.1f} tokens/s  {row['gain']:5.2f}× "
        f"({min(row['gains']):.2f}-{max(row['gains']):.2f}; predicted "
        f"{'-' if predicted is None else f'{predicted:.2f}×'})  "
        f"{row['accepted_tokens']:>5} of {row['draft_tokens']:>5} guesses right ({right:.0%})  "
        f"{'same answers' if row['same_answers'] else 'DIFFERENT ANSWERS'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-tokens", type=int, default=65_536)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--workload", nargs="+", choices=[each.name for each in WORKLOADS])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(row["same_answers"] for row in rows):
        sys.exit("answers differ")


if __name__ == "__main__":
    main()

"""Whether a server answers rightly whatever is asked of it: a line a check, `ok` or `FAILED`.

    python benchmarks/served_check.py --device cuda [--json FILE]
    python benchmarks/served_check.py --device cpu --among 24 --copies 1

Starts `headrace serve` with the default model and asks: every way to sample, logprobs, grammars,
seeds alone and among others, scoring, embeddings; whole, streamed and all at once. What can be told
from an answer is checked, not only that it came. For devices that the test suite does not run on;
needs the standard library and what the server needs. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checks.cases import CHAT, COMPLETIONS, Case, Wrong, ids_of, make_cases, verify
from checks.draws import expected_shares, mean_shares, surprise
from checks.replies import Body, Refused, Reply, ask, fetch
from peers.adapter import HttpServer, free_port

LEAST_CHANCE = 1e-4  # of counts as odd as those drawn; below it the draws are called wrong
DRAWS_A_REQUEST, DRAWING_REQUESTS = 16, 64
LISTED = 20  # alternatives with each token: the most that a server gives
SEEDED = 16  # requests that are asked alone and among others
STORY = "Tell a story about a mill on a river, and about the people who bring their grain to it."


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    is_ok: bool
    details: str
    took_s: float


def run_check(name: str, work: Callable[[], str]) -> Outcome:
    began = time.perf_counter()
    try:
        is_ok, details = True, work()
    except (Wrong, Refused) as error:
        is_ok, details = False, str(error)
    except Exception as error:  # whatever it is, the checks after it are wanted too
        is_ok, details = False, f"{type(error).__name__}: {error}"
    outcome = Outcome(name, is_ok, details, time.perf_counter() - began)
    word = "ok    " if is_ok else "FAILED"
    print(f"{word} {name:36} {outcome.took_s:6.2f} s  {details}".rstrip(), flush=True)
    return outcome


# One request at a time


def check_case(port: int, case: Case) -> str:
    """Whole and streamed; the two are one text where nothing is left to chance."""
    whole, streamed = (ask(port, case.path, case.body, stream=s) for s in (False, True))
    details = verify(case, whole)
    verify(case, streamed)
    if case.is_settled and texts(whole) != texts(streamed):
        raise Wrong(f"streamed {texts(streamed)!r}, whole {texts(whole)!r}")
    return details


def texts(reply: Reply) -> list[str]:
    return [choice.text for _, choice in sorted(reply.choices.items())]


def check_embeddings(port: int) -> str:
    inputs = ["A mill by the river.", "A mill at a river.", "Taxes are due in May."] * 3

    def vectors(texts: list[str]) -> list[list[float]]:
        found = fetch(port, "/v1/embeddings", {"input": texts})
        return [item["embedding"] for item in sorted(found["data"], key=lambda i: i["index"])]

    def alike(one: Sequence[float], other: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    together = vectors(inputs)
    alone = [vectors([text])[0] for text in inputs[:3]]
    lengths = [alike(vector, vector) for vector in together]
    if any(abs(length - 1) > 1e-3 for length in lengths):
        raise Wrong(f"squared lengths {lengths}")
    least = min(alike(vector, alone[n % 3]) for n, vector in enumerate(together))
    if least < 0.999:
        raise Wrong(f"together and alone are alike by {least:.5f} only")
    near, far = alike(alone[0], alone[1]), alike(alone[0], alone[2])
    if near <= far:
        raise Wrong(f"near texts are alike by {near:.3f}, others by {far:.3f}")
    return f"{len(alone[0])} values; together and alone alike by {least:.6f}"


def check_refusals(port: int) -> str:
    context = fetch(port, "/v1/models")["data"][0]["max_model_len"]
    bodies: list[Body] = [
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "top_p": 0},
        {"prompt": [1] * (context + 1)},
        {"prompt": "x", "guided_regex": "("},
        {"prompt": "x", "allowed_token_ids": []},
        {"prompt": "x", "stop": ["a"] * 17},
    ]
    for body in bodies:
        try:
            ask(port, COMPLETIONS, body)
        except Refused as error:
            if error.status != 400:
                raise
        else:
            raise Wrong(f"was answered: {str(body)[:80]}")
    return f"{len(bodies)} of {len(bodies)} with 400"


# What is drawn


def check_wide_top_k(port: int) -> str:
    """Of a flat distribution. More than the vocabulary is as no top_k, seed by seed; and the fewer
    are kept, the likelier is the least likely that is drawn."""
    body: Body = {
        **{"prompt": "The", "max_tokens": 16, "n": 16, "seed": 11, "ignore_eos": True},
        **{"temperature": 3.0, "top_p": 1.0, "logprobs": 0},
    }
    drawn = {
        top_k: ask(port, COMPLETIONS, {**body, "top_k": top_k})
        for top_k in (0, 1_000_000, 40_000, 5_000, 1_025, 50)
    }
    if texts(drawn[0]) != texts(drawn[1_000_000]):
        raise Wrong("a top_k of a million draws other tokens than none does, of the same seed")
    least = {k: min(c.tokens[0].logprob for c in r.choices.values()) for k, r in drawn.items()}
    said = "least log-probability of a first token: " + ", ".join(
        f"top_k {k or 'none'} {value:.1f}" for k, value in least.items()
    )
    if not least[50] > least[1_025] >= least[5_000] >= least[40_000] >= least[0]:
        raise Wrong(said)
    return said


# Fields of a request; `bias` and `allowed` are by rank in the list of the likeliest tokens.
DRAWN_SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "top_k 8": {"top_k": 8},
    "temperature 2, top_k 19": {"temperature": 2.0, "top_k": 19},
    "temperature 0.5, top_k 19": {"temperature": 0.5, "top_k": 19},
    "top_p 0.15": {"top_p": 0.15},
    "min_p 0.35": {"min_p": 0.35},
    "typical_p 0.5, top_k 19": {"typical_p": 0.5, "top_k": 19},
    "all filters": {
        **{"temperature": 0.8, "top_k": 19, "min_p": 0.3, "typical_p": 0.95, "top_p": 0.8}
    },
    "logit_bias, top_k 8": {"bias": {0: -1.5, 3: 1.0, 6: 0.5}, "top_k": 8},
    "allowed_token_ids": {"allowed": [1, 2, 4, 7, 11]},
    "allowed, top_p 0.7": {"allowed": [0, 2, 4, 7, 11, 15], "top_p": 0.7},
}


def check_draws(port: int, setting: dict[str, Any]) -> str:
    """First tokens of one prompt, many times over, against what the model's own list says."""
    prompt = {"prompt": "My favourite", "max_tokens": 1, "logprobs": LISTED, "ignore_eos": True}
    top = ask(port, COMPLETIONS, {**prompt, "temperature": 0}).first.tokens[0].top
    how = dict(setting)
    body: Body = {**prompt, "temperature": 1.0, "top_p": 1.0, "n": DRAWS_A_REQUEST}
    if ranks := how.pop("bias", None):
        body["logit_bias"] = {str(ids_of(port, top[r][0])[0]): b for r, b in ranks.items()}
        how["bias"] = {top[rank][0]: value for rank, value in ranks.items()}
    if ranks := how.pop("allowed", None):
        body["allowed_token_ids"] = [ids_of(port, top[rank][0])[0] for rank in ranks]
        how["allowed"] = [top[rank][0] for rank in ranks]
    body |= {name: value for name, value in how.items() if name not in ("bias", "allowed")}
    seed = zlib.crc32(
        repr(setting).encode()
    )  # others for each setting: they are tests of their own
    bodies = [{**body, "seed": seed + n} for n in range(DRAWING_REQUESTS)]
    drawn: Counter[str] = Counter()
    shares: list[dict[str, float]] = []
    with ThreadPoolExecutor(16) as pool:
        for reply in pool.map(partial(ask, port, COMPLETIONS), bodies):
            tokens = [choice.tokens[0] for choice in reply.choices.values()]
            drawn.update(token.text for token in tokens)
            # The drawn token is listed too, last, where it is none of the likeliest.
            shares += [expected_shares(token.top[:LISTED], how) for token in tokens]
    chance, said = surprise(drawn, mean_shares(shares))
    if chance < LEAST_CHANCE:
        raise Wrong(f"{said}; chance {chance:.1e}")
    return f"{drawn.total()} draws, {said}; chance {chance:.2g}"


# Many at once


SEEDED_SETTINGS: dict[str, Body] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1, "top_p": 1},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"temperature": 0.8, "top_p": 1, "top_k": 50},
    "penalties": {"temperature": 0.8, "top_p": 1, "repetition_penalty": 1.1},
}


@contextmanager
def others(port: int, count: int) -> Iterator[None]:
    """So many clients that keep the server busy with requests of all kinds, until the end."""
    stop = threading.Event()
    failures: list[str] = []

    def client(number: int) -> None:
        chooser = random.Random(number)
        while not stop.is_set():
            body: Body = {
                "messages": [{"role": "user", "content": f"{STORY} It has {number} wheels."}],
                "max_tokens": chooser.randint(8, 96),
                "ignore_eos": True,
                **chooser.choice([*SEEDED_SETTINGS.values()]),
            }
            try:
                ask(port, CHAT, body)
            except Exception as error:
                failures.append(str(error))
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # until they are being served
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise Wrong(f"{len(failures)} of the others failed: {failures[0]}")


def check_among_others(port: int, how: Body, count: int, least_same: int) -> str:
    """The same requests alone, again alone, and among others: where do their texts part?"""

    def pieces(number: int) -> list[str]:
        content = f"Name a river and say {number + 2} things about it."
        body = {"messages": [{"role": "user", "content": content}], **how}
        body |= {"max_tokens": 32, "ignore_eos": True, "seed": 100 + number}
        return ask(port, CHAT, body, stream=True).first.pieces

    alone, again = ([pieces(number) for number in range(SEEDED)] for _ in range(2))
    if changed := [parting(*pair) for pair in zip(alone, again, strict=True) if pair[0] != pair[1]]:
        raise Wrong(f"alone, {len(changed)} of {SEEDED} part from themselves, at piece {changed}")
    with others(port, count), ThreadPoolExecutor(SEEDED) as pool:
        among = list(pool.map(pieces, range(SEEDED)))
    partings = [parting(*pair) for pair in zip(alone, among, strict=True)]
    same = partings.count(None)
    said = f"{same} of {SEEDED} the same among {count} others"
    if same < SEEDED:
        said += f"; others part at piece {[p for p in partings if p is not None]} of about 32"
    if same < least_same:
        raise Wrong(said)
    return said


def parting(left: Sequence[str], right: Sequence[str]) -> int | None:
    """The first place where they differ; None where they don't."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def check_mixture(port: int, cases: Sequence[Case], copies: int) -> str:
    """All cases at once, half of them streamed, each answer looked at as if it had come alone."""
    jobs = [(case, number % 2 == 1) for number in range(copies) for case in cases]
    random.Random(0).shuffle(jobs)

    def wrong_with(job: tuple[Case, bool]) -> str:
        case, stream = job
        try:
            verify(case, ask(port, case.path, case.body, stream=stream))
        except (Wrong, Refused) as error:
            return f"{case.name}: {error}"
        return ""

    with ThreadPoolExecutor(len(jobs)) as pool:
        wrong = [said for said in pool.map(wrong_with, jobs) if said]
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(jobs)} answers: " + "; ".join(sorted(set(wrong))[:5]))
    return f"{len(jobs)} requests at once"


# All of them


def run_checks(port: int, options: argparse.Namespace) -> list[Outcome]:
    least_same = options.least_same
    if least_same is None:  # docs/gpu.md: without that flag a GPU promises it only to lone requests
        is_promised = options.device == "cpu" or "--batch-invariant" in options.serve_flags
        least_same = SEEDED if is_promised else 0
    cases = make_cases(port)
    works: list[tuple[str, Callable[[], str]]] = [
        *((case.name, partial(check_case, port, case)) for case in cases),
        ("embeddings", partial(check_embeddings, port)),
        ("refusals", partial(check_refusals, port)),
        ("top_k wider than any list", partial(check_wide_top_k, port)),
        *(
            (f"draws: {name}", partial(check_draws, port, setting))
            for name, setting in DRAWN_SETTINGS.items()
        ),
        *(
            (
                f"among others: {name}",
                partial(check_among_others, port, how, options.among, least_same),
            )
            for name, how in SEEDED_SETTINGS.items()
        ),
        ("all at once", partial(check_mixture, port, cases, options.copies)),
        ("and greedy once more", partial(check_case, port, cases[0])),
    ]
    return [run_check(name, work) for name, work in works if options.only in name]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="smollm2", help="whose tokenizer has 49,152 tokens")
    parser.add_argument("--port", type=int, help="of a server that runs already: none is started")
    parser.add_argument("--serve-flags", default="", help='more flags, as in "--graphs lazy"')
    parser.add_argument("--among", type=int, default=96, help="clients beside seeded requests")
    parser.add_argument("--copies", type=int, default=4, help="of each case, all at once")
    parser.add_argument(
        "--least-same",
        type=int,
        help=f"of {SEEDED} seeded texts; default: all, or none on a GPU without --batch-invariant",
    )
    parser.add_argument("--log", type=Path, help="keep here what the server prints")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    server = None
    port = options.port
    if port is None:
        port = free_port()
        run = "from headrace.cli.commands import main; main()"
        command = [sys.executable, "-c", run, "serve", options.model, "--device", options.device]
        command += ["--port", str(port), "--log-level", "warning"]
        began = time.perf_counter()
        command += shlex.split(options.serve_flags)
        server = HttpServer(command, port, "/ready", log=options.log)
        print(f"server ready after {time.perf_counter() - began:.1f} s", flush=True)
    try:
        backend = fetch(port, "/version")["identity"]["backend"]
        print(f"computes: {backend['name']}, {backend['path']}", flush=True)
        outcomes = run_checks(port, options)
    finally:
        if server is not None:
            server.stop()
    failed = [outcome.name for outcome in outcomes if not outcome.is_ok]
    print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} ok" + "".join(f"; {n}" for n in failed)
    )
    if options.json:
        report = {"backend": backend, "failed": failed, "checks": [asdict(o) for o in outcomes]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())

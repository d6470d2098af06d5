"""`headrace cost`: the bill, break-even and verdict; exit statuses; documented JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.hardware.api_prices import all_apis

ROOT = Path(__file__).resolve().parents[2]
# The seeds' two H100s at 215 tokens/s, output only.
SEEDS = ("--price", "4.9", "--gpus", "2", "--rate", "215", "--input", "0", "--output", "256")


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cost", *words])
    assert result.exit_code == exit_code, result.output
    if exit_code != 2:
        assert all(len(line) <= 100 for line in result.output.splitlines())
    return result.output


def facts(*words: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["cost", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_seeds_example() -> None:
    text = shown(*SEEDS, "--tokens", "80M", "--api", "gpt4=20/20", "--api", "4o=7.5/7.5",
                 exit_code=1)  # fmt: skip
    assert re.search(r"a million tokens +\$88\.20 blended", text)
    assert re.search(r"^gpt4 .* 352\.8M \(1\) ", text, re.MULTILINE)
    assert re.search(r"^4o .* never +never ", text, re.MULTILINE)
    assert "needs 2 replicas from 557.3M tokens a month on" in text
    assert "verdict: Use 4o" in text


def test_an_api_that_is_dearer_is_status_0() -> None:
    text = shown(*SEEDS, "--tokens", "500M", "--api", "gpt4=20/20")
    assert "verdict: Host it yourself: 500M tokens" in text
    assert "USD a month (up)" in text


def test_a_price_of_the_table_has_its_date() -> None:
    text = shown("--gpu", "H200 SXM", "--rate", "5000", "--input", "512", "--output", "300")
    assert re.search(r"\$4 per GPU and hour \(Verda, on-demand, 2026-08-22\)", text)
    spot = facts("--gpu", "h200-sxm", "--price-kind", "spot", "--rate", "5000", "--output", "300")
    assert spot["usd_per_gpu_hour"] == 2.0
    assert "spot" in spot["price_source"]


def test_without_a_price_there_are_gpu_hours_and_it_is_said() -> None:
    words = ("--gpu", "gb300", "--rate", "1200", "--input", "512", "--output", "300", "--rps", "20")
    text = shown(*words)
    assert "no on-demand price of gb300 is known: GPU-hours without money" in text
    assert re.search(r"GPU-hours +3,600, 0 of them idle", text)
    found = facts(*words)
    assert found["bill"]["replicas"] == 5  # 20 x 300 / 1200
    assert found["bill"]["usd"] is None
    assert found["verdict"]["is_cheaper"] is None
    assert found["apis"][0]["most_usd_per_gpu_hour"] > 0
    shown("--rate", "1200", "--output", "300")  # no GPU at all


def test_one_stream_is_refused() -> None:
    text = shown("--price", "3.2", "--gpus", "2", "--stream-rate", "118", "--output", "256",
                 exit_code=2)  # fmt: skip
    assert "$15.07 a million" in text
    assert "one stream" in text


def test_a_measured_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = {"completed": 100, "total_input_tokens": 51200, "total_output_tokens": 30000,
              "output_throughput": 2400.0, "max_concurrency": 64}  # fmt: skip
    path.write_text(json.dumps(result))
    found = facts("--measured", str(path), "--gpu", "h100-sxm")
    assert found["output_tokens_s"] == 2400
    assert found["input_tokens"] == 512
    assert found["tokens_s"] == pytest.approx(2400 * 812 / 300)
    path.write_text(json.dumps({**result, "max_concurrency": 1}))
    shown("--measured", str(path), exit_code=2)


def test_a_workloads_lengths_and_cache() -> None:
    found = facts("--rate", "5000", "--price", "2", "--workload", "rag")
    assert found["input_tokens"] > 10 * found["output_tokens"]
    assert 0 < found["cached_share"] < 1
    assert found["bill"]["parts"]["cached_input_usd"] < found["bill"]["parts"]["input_usd"]


def test_json_is_as_documented() -> None:
    found = facts(*SEEDS, "--tokens", "1B", "--api", "x=20/20/1")
    documented = (ROOT / "docs/cost.md").read_text("utf-8")
    names = [*found, *found["bill"], *found["bill"]["parts"], *found["apis"][0], *found["verdict"]]
    assert [name for name in names if f"`{name}`" not in documented] == []
    assert found["bill"]["replicas"] == 2
    assert found["is_full_replica"] is False
    explained = facts(*SEEDS, "--api", "x=20/20", "--explain")["explain"]
    assert any("352.8M" in line for line in explained)


def test_every_formula_has_its_numbers() -> None:
    text = " ".join(shown(*SEEDS, "--tokens", "80M", "--api", "x=20/20", "--explain",
                          "--engineering-hours", "10", "--engineering-usd", "100",
                          exit_code=1).split())  # fmt: skip
    assert "215 x 720 x 3,600 x 1 = 557.3M tokens" in text
    assert "1,440 x $4.9 + $1,000 = $8,056.00" in text
    assert "$8,056.00 / 80M = $100.7" in text
    assert "(1 x $7,056 + $1,000) / $20 a million = 402.8M tokens" in text


def test_the_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    shown(*SEEDS, "--api", "x=20/20", "--svg", str(path))
    assert ElementTree.fromstring(path.read_text("utf-8")).tag.endswith("svg")
    shown("--rate", "10", "--output", "10", "--svg", str(path), exit_code=2)


def test_known_prices_are_listed(tmp_path: Path) -> None:
    text = shown("--apis")
    for price in all_apis():
        assert re.search(rf"^{re.escape(price.name)} ", text, re.MULTILINE)
    assert "litellm" in text
    path = tmp_path / "own.toml"
    path.write_text('[api]\n"gpt-4o" = { input = 1, output = 2 }\n')
    words = ("--api-prices", str(path), "--api", "gpt-4o", "--rate", "9", "--output", "9")
    assert facts(*words)["apis"][0]["output_usd"] == 2
    assert len(json.loads(CliRunner().invoke(app, ["cost", "--apis", "--json"]).output)) == len(
        all_apis()
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--rate"),
        (("--rate", "5", "--measured", "x.json"), "both"),
        (("--rate", "5"), "--input"),
        (("--rate", "5", "--input", "5"), "--output"),
        (("--rate", "0", "--output", "5"), "above 0"),
        (("--rate", "5", "--output", "5", "--tokens", "many"), "80M"),
        (("--rate", "5", "--output", "5", "--tokens", "0"), "80M"),
        (("--rate", "5", "--output", "5", "--tokens", "5M", "--rps", "2"), "expected one"),
        (("--rate", "5", "--output", "5", "--rps", "-1"), "above 0"),
        (("--rate", "5", "--output", "5", "--gpu", "H100"), "h100-pcie"),
        (("--rate", "5", "--output", "5", "--gpus", "0"), "1 or more"),
        (("--rate", "5", "--output", "5", "--utilization", "1.5"), "0 to 1"),
        (("--rate", "5", "--output", "5", "--api", "gpt4o"), "gpt-4o"),
        (("--rate", "5", "--output", "5", "--api", "x=1"), "NAME=IN/OUT"),
        (("--rate", "5", "--workload", "games"), "chat"),
        (("--rate", "5", "--workload", "chat", "--output", "5"), "--workload"),
        (("--rate", "5", "--output", "5", "--price-kind", "free"), "on-demand"),
        (("--rate", "5", "--output", "5", "--measured", "absent.json"), "both"),
        (("--measured", "absent.json"), "can't be read"),
    ],
)
def test_bad_input_is_status_2(words: tuple[str, ...], expected: str) -> None:
    assert expected in shown(*words, exit_code=2)

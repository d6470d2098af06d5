"""`headrace gpus`: tables within 100 columns, documented JSON, sources on request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.commands import app
from headrace.hardware.gpus import Gpu, all_gpus

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"name", "label", "vendor", "kind", "family", "memory_bytes", "nominal_bytes",
          "bandwidth_bytes_s", "sms", "capability", "link_bytes_s", "pcie_bytes_s", "aliases",
          "flops", "prices", "sources", "notes"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def shown(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["gpus", *words])
    assert result.exit_code == exit_code, result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())
    return result.output


def test_all_are_listed() -> None:
    text = shown()
    for gpu in all_gpus():
        assert re.search(rf"^{gpu.name} ", text, re.MULTILINE)
    assert re.search(r"^h100-sxm +79\.6 +3,350 +989\.5 +1,979 +- +450 ", text, re.MULTILINE)
    assert re.search(r"^mi325x +~256 ", text, re.MULTILINE)
    assert "\nthis-machine " in text


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_one_in_full_with_its_sources(gpu: Gpu) -> None:
    text = shown(gpu.name, "--sources")
    dated = re.findall(r"^  \[\d+\] +20\d\d-", text, re.MULTILINE)
    cited = {int(number) for number in re.findall(r"  \[(\d+)\]$", text, re.MULTILINE)}
    assert cited == set(range(1, len(dated) + 1))  # each figure cites one that is listed


def test_a_missing_price_is_said() -> None:
    assert "none is known" in shown("gb300")
    assert "none is known" not in shown("h100-sxm")


def test_sources_of_the_whole_table() -> None:
    text = shown("--sources")
    assert "2026-08-21: ai-dynamo/aiconfigurator" in text


def test_json_has_the_documented_fields() -> None:
    rows = json.loads(shown_raw("--json"))
    assert [row["name"] for row in rows] == [*(gpu.name for gpu in all_gpus()), "this-machine"]
    assert all(set(row) == FIELDS for row in rows)
    one = json.loads(shown_raw("h100-sxm", "--json"))
    assert one["flops"]["bf16"] == 989.5e12
    assert one["sources"]["flops.bf16"]["date"]
    assert set(one["prices"][0]) == {"usd_per_hour", "kind", "provider", "date", "source"}
    documented = (ROOT / "docs/gpus.md").read_text("utf-8")
    assert all(f"`{field}`" in documented for field in FIELDS)


def shown_raw(*words: str) -> str:
    result = CliRunner().invoke(app, ["gpus", *words])
    assert result.exit_code == 0
    return result.output


def test_this_machine() -> None:
    assert shown("here").startswith("this-machine  ")
    assert json.loads(shown_raw("HERE", "--json"))["kind"] == "cpu"


def test_bad_names_end_with_2() -> None:
    assert "h100-pcie" in shown("H100", exit_code=2)
    assert "headrace gpus" in shown("h101-sxm", exit_code=2)

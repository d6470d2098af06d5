"""What the client's machine says about itself."""

from __future__ import annotations

from pathlib import Path

from headrace.bench.health import slow_clock


def test_a_machine_that_saves_power_is_said(tmp_path: Path) -> None:
    """aiperf#1424: the governor doubled TTFT, which was taken for prefill."""
    assert slow_clock(tmp_path) is None  # it does not say
    file = tmp_path / "cpu0/cpufreq/scaling_governor"
    file.parent.mkdir(parents=True)
    file.write_text("performance\n")
    assert slow_clock(tmp_path) is None
    file.write_text("powersave\n")
    assert "powersave" in (slow_clock(tmp_path) or "")

"""The parts of benchmarks/journey.py that need no model."""

from __future__ import annotations

import pytest

from journey import OUTPUT, OWN, SHARED, make_jobs, show


def test_jobs_share_their_beginning_and_nothing_else() -> None:
    jobs = make_jobs(20, 49_152)
    beginnings = {tuple(job.prompt[:SHARED]) for job in jobs}
    assert len(beginnings) == 1
    assert len({job.prompt[SHARED] for job in jobs}) > 15
    assert all(OWN[0] <= len(job.prompt) - SHARED <= OWN[1] for job in jobs)
    assert all(OUTPUT[0] <= job.output_tokens <= OUTPUT[1] for job in jobs)
    assert jobs == make_jobs(20, 49_152)


def test_gains_are_of_medians_step_by_step_and_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    show({"one by one": [10.0, 11.0, 9.0], "static": [20.0, 90.0, 19.0], "continuous": [50.0] * 3})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[-2:] == ["2.00x", "2.00x"]
    assert lines[3].split()[-2:] == ["2.50x", "5.00x"]

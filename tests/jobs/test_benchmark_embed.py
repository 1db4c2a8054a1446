"""`jobs.benchmark embed`: its parts."""

from __future__ import annotations


def test_a_part_that_there_is_not_is_refused(run_job_here, tmp_path):
    done = run_job_here("benchmark", "embed", "--only", "length", "--work", tmp_path)
    assert "only: 'length' is not allowed; allowed: rate, night, plan, engines" in done.refusal

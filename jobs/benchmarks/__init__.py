"""What `jobs.benchmark` measures: ours and others' side by side, in one run."""

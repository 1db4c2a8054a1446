"""The measurements of `jobs.benchmark`: polyrank and others' code side by side, in one run."""

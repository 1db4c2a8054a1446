"""The Python API: `pipeline.Ranker` and `Pool.search`. `pipeline/API.md` shows how to use it."""

"""Python's way in: `pipeline.Ranker` and `Pool.search`. `pipeline/API.md` shows how to use it."""

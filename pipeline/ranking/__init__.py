"""The Python API: `pipeline.Ranker`. `pipeline/API.md` shows how to use it."""

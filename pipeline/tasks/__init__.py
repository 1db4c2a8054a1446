"""What `pipeline.shards` and training run tasks with: where they run, on what, and what they report."""

"""Parts of `pipeline.shards` and training: the places where tasks run, their resources, and their reports."""

"""What `pipeline.storage` and artifacts stand on: locks, retries, copies on a node, names for contents."""

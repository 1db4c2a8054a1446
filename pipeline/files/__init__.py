"""Parts of `pipeline.storage` and artifacts: locks, retries, copies on a node, fingerprints."""

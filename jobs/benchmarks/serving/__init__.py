"""The services that `jobs.benchmark serve` measures, and the load on them."""

"""`jobs.benchmark serve`: the load, the services, the measurements, and their pictures."""

"""`jobs.benchmark serve`: the load, the services it meets, what is measured, and its pictures."""

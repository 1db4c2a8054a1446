"""Runs the tasks of jobs, on a cluster or in this process, each one once, however often a job is killed.

draft      the unfinished output, with the record of each finished task (`records`)
run        runs what is missing, on the cluster or in this process (`executors`)
attempts   one task, and how often it was started
report     what tasks cost, and which were slow, restarted or failed
resources  cores and GPUs; `waiting` for them, and `actors` on them
messages   from workers to the driver, and back
"""

"""Runs the tasks of jobs, on a cluster or in this process, each one once, however often a job is killed.

draft      the unfinished output, with a record of each finished task
run        runs what is missing
attempts   one task, and how often it was started
report     what tasks cost, and which were slow, restarted or failed
resources  cores and GPUs; `waiting` for them, and `actors` on them
"""

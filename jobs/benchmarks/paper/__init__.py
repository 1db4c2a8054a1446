"""The tables of the Poly-encoder paper as sweeps of jobs.finetune and jobs.evaluate.

    tables.py   the models that each table compares, and the paper's numbers
    trials.py   a model, a corpus and a seed: trained and evaluated once, as tasks of the cluster
    report.py   the results beside the paper's: Markdown, a chart, rows

Table 5, inference time, trains nothing: jobs/benchmarks/inference_time.py.
"""

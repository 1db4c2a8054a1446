"""The tables of the Poly-encoder paper as sweeps of jobs.finetune and jobs.evaluate.

    tables.py   which models each table compares, and the numbers that the paper has for them
    trials.py   a model, a corpus and a seed: trained and evaluated once, as tasks of the cluster
    report.py   what came out, beside the paper's: Markdown, a chart, rows

Table 5, inference time, trains nothing: jobs/benchmarks/inference_time.py.
"""

"""The tables of the Poly-encoder paper as sweeps of jobs.finetune and jobs.evaluate.

tables.py          the models that each table compares, and the paper's numbers
trials.py          a model, a corpus and a seed: trained and evaluated once, as tasks of the cluster
sweep.py           a table from its trials to rows beside the paper's numbers
"""

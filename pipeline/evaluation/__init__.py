"""Measures how well a ranker ranks, beside baselines.

protocols        how each public task is asked
questions        contexts, candidates, and which is right; validation in training uses them, too
ranking          scorers answer questions; `baselines` are some
metrics          ranks, and the metrics made of them
results          the metrics of one scorer
significance     intervals, and whether two models differ
report           results to read
least_score      for questions whose right answer may be absent
retrieval        queries with several right documents (BEIR)
"""

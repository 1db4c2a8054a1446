"""Classifies texts by intent, with a small head on the vectors of a frozen encoder.

It is a stage of its own beside `pools`: it reads vectors of `models` and makes a head with its labels,
which is neither a ranker nor a pool.
"""

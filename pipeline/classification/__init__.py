"""Texts to intents: a small classifier on the vectors of a frozen encoder.

A stage of its own beside `retrieval`: it reads vectors of `models`, and what it makes, a head with its
labels, is neither a ranker nor a pool.
"""

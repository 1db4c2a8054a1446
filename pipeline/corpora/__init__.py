"""Turns public formats into examples, with Ray Data. `schema.py` has the columns."""

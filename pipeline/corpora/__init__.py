"""Public formats to examples, with Ray Data. The columns are in `schema.py`."""

"""Encoders and scorers: torch only. No Ray, no MLflow, no files beyond load and save.

Axes in names: B batch, T tokens, D model width, M context vectors (codes), C candidates, N rows.
"""

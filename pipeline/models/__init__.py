"""Encoders and scorers: torch only. No Ray, no MLflow, no files beyond load and save.

A forward pass goes through inference.py, ranker.py, heads.py and encoder.py, and on a CPU through packing.py
and cpu.py. ConveRT has a folder of its own, convert_rt; interop knows the formats of other projects.

Axes in names: B batch, T tokens, D model width, M context vectors (codes), C candidates, N rows.
"""

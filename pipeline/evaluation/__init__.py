"""Measures how well a ranker ranks, beside baselines."""

"""Candidate pools: planning, embedding, building, checking and publishing their versions."""

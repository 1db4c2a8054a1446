"""Candidate pools: embedded once, memory-mapped, searched exactly."""

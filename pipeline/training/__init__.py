"""Tokens to trained weights: batches, the one loop, its Ray Train shell."""

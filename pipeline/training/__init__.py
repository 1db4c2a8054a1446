"""Trains encoders and rankers: batches, the training loop, and its shell on Ray Train."""

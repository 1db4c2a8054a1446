"""How good a ranker is."""

"""What answers: a FastAPI application on Ray Serve."""

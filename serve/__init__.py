"""The service: a FastAPI application on Ray Serve."""

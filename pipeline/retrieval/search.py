"""See `pipeline.search`."""

from pipeline.search import *  # noqa: F403

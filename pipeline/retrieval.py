"""`pipeline.retrieval.search` is the former name of `pipeline.search`, and still imports."""

import sys

from pipeline import search

sys.modules[f"{__name__}.search"] = search

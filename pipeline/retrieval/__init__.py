"""The former name of `pipeline.search`, for programs that import it from here."""

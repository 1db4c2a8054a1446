"""Parts of `pipeline.config`: the words of a command line, its help, and its faults."""

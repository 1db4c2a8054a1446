"""Generated data: the sample corpora of the demo and of tests, and Reddit dumps of any size."""

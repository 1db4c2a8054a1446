"""Generated data: the embedded sample corpora, and Reddit dumps of any size."""

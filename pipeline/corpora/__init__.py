"""Turns public formats into examples, with Ray Data.

schema                      the columns of a corpus, and its splits
formats, reddit             a module for each format; Reddit's dumps have a room of their own
file_tasks                  what all other formats share: a task per file, from rows to Parquet
raw, file_kinds             lines of compressed files, and files that are no text
privacy, author_key         tags in place of personal data, hashes in place of names
published_counts, variants  whether the input is the whole set, and is there once
fixed_candidates            the other articles of article search
buckets                     rows on disk by hash, for joins
dedup, report, drawn_rows   duplicates; a look at a corpus; examples at chosen places
"""

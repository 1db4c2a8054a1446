"""Candidate pools: planning, embedding, building, checking and publishing their versions.

pool, shard, vector_format    an open version, and its files
build, sketch                 make the files; `build_records` is the record of the build
inputs, candidates            what a version is made from, and its rows
plan, changes                 what is embedded, copied, dropped, beside the version before
settings, embed, embedder     the build, and the work of an actor in it
gate                          what a version has to pass
versions, promotion, lock     CURRENT, old versions, and who may change them
device_rows                   the vectors on a GPU
survey, estimate              a look at a pool; --dry-run
"""

"""Encoders and scorers: torch only. No Ray, no MLflow, no files beyond load and save.

settings             one dataclass for each architecture
ranker               the module that knows all architectures, and the folder of a model
inference            texts in, vectors, scores or their explanation out; a forward pass goes on through
                     `heads` and `encoder`
heads, encoder       bi-, poly- and cross-encoders, and the Transformer underneath
tokens, truncation   texts to ids, and what is left out
packing, cpu         texts of many lengths without padding, and faster layers on CPUs
precision, int8      bf16, float32 and 8 bits; `torch_operators` are private ones of torch
losses               functions of scores; `pretraining_heads` have their own
flops                operations of a step
sources              where an encoder comes from
convert_rt, interop  ConveRT; the formats of other projects
convert, polyencoder earlier names, which still import

Axes in names: B batch, T tokens, D model width, M context vectors (codes), C candidates, N rows.
"""

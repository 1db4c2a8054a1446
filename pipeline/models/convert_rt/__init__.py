"""ConveRT (Henderson et al., 2019): a small dual encoder, trained from raw examples of dialogue.

tokenizer.py      text → ids; subwords outside the vocabulary are hashed
encoder.py        ids → one vector per text → encodings of contexts and candidates, and their cosines
quantisation.py   tables and linear layers of 8 bits
start.py          first weights for small corpora
folder.py         the folder of a model
"""

from pipeline.models.convert_rt.encoder import (
    ConvertNetwork,
    feed_forward_2,
    reduced,
    token_vectors,
)
from pipeline.models.convert_rt.folder import load, new, save
from pipeline.models.convert_rt.tokenizer import ConvertTokenizer, token_ids

__all__ = [
    "ConvertNetwork",
    "ConvertTokenizer",
    "feed_forward_2",
    "load",
    "new",
    "reduced",
    "save",
    "token_ids",
    "token_vectors",
]

"""ConveRT (Henderson et al., 2019): a small dual encoder, trained from raw examples of dialogue.

tokenizer.py      text → ids; subwords outside the vocabulary are hashed (fingerprint.py)
encoder.py        ids → one vector per text → an encoding per side
network.py        the ranker: contexts with and without earlier turns, candidates, cosines
quantisation.py   tables of 8 bits
int8.py           linear layers of 8 bits, for inference
start.py          first weights for small corpora
files.py          the folder of a model
"""

from pipeline.models.convert.encoder import feed_forward_2, reduced, token_vectors
from pipeline.models.convert.files import load, new, save
from pipeline.models.convert.int8 import quantise_blocks
from pipeline.models.convert.network import ConvertNetwork
from pipeline.models.convert.tokenizer import ConvertTokenizer, token_ids

__all__ = [
    "ConvertNetwork",
    "ConvertTokenizer",
    "feed_forward_2",
    "load",
    "new",
    "quantise_blocks",
    "reduced",
    "save",
    "token_ids",
    "token_vectors",
]

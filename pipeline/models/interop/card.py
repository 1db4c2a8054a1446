"""README.md of a converted model: what the folder is, how it is used, and how exact it is."""

from __future__ import annotations

from pipeline.models.ranker import Ranker

CARD = "README.md"

_BI = """\
`context/` and `candidate/` are directories of sentence-transformers, one for each side. A score is the dot
product of a context's and a candidate's vector. The turns of a context are one text, oldest first, joined by
line breaks. A context of more than {context_tokens} tokens loses its beginning, a candidate of more than
{candidate_tokens} its end.

```python
from sentence_transformers import SentenceTransformer

contexts, candidates = SentenceTransformer("context"), SentenceTransformer("candidate")
texts = ["i am a nurse .", "it rains ."]
scores = contexts.encode(["hi\\nwhat do you do ?"]) @ candidates.encode(texts).T
print(texts[scores[0].argmax()], scores)
```
"""
_CROSS = """\
The folder is a CrossEncoder of sentence-transformers. The turns of a context are one text, oldest first,
joined by line breaks. Where a context has more than {context_tokens} tokens or a candidate more than
{candidate_tokens}, scores differ from polyrank's: it truncates each on its own, sentence-transformers both
together, to {pair_tokens}.

```python
from sentence_transformers import CrossEncoder

model = CrossEncoder(".")
texts = ["i am a nurse .", "it rains ."]
scores = model.predict([("hi\\nwhat do you do ?", text) for text in texts])
print(texts[scores.argmax()], scores)
```
"""
_ONNX = """\
`model.onnx` takes `ids`, int64 [texts, tokens], which `vocabulary.json` makes; rows end in the pad id. Of a
text keep the first {context_tokens} ids for `context` and `sentence`, the first {candidate_tokens} for
`candidate`; the graph fails on longer rows than the larger of both. `context` and `candidate` are float32
encodings of length 1, and `sentence` is for other tasks. A score is the dot product of one text's `context`
and the other's `candidate`.

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(encodings,) = session.run(["context"], {{"ids": ids}})
```
"""
_POLYRANK = """\
The folder is a ranker of polyrank, of the architecture {architecture}.

    polyrank evaluate --model . --corpus CORPUS
{pools}    polyrank serve --model .
"""
_POOLS = """\
    polyrank embed_pool --model . --candidates FILE --pools POOLS --name NAME
"""
_PRECISION = """\
## How exact it is

In float32 the vectors and scores are the original's to 1e-5 of their size. In bfloat16 or float16 they differ
in the third digit. polyrank computes in bfloat16 by default where the hardware multiplies it, so compare with
`--precision fp32`.
"""


def card(ranker: Ranker, kind: str, origin: str) -> str:
    """The text for a folder that holds `ranker` as a `kind`, made of the model at `origin`."""
    config = ranker.config
    if kind == "onnx":
        use = _ONNX
    elif kind == "ranker":
        use = _POLYRANK.format(
            architecture=config.architecture, pools=_POOLS if config.has_vectors else ""
        )
    elif config.has_vectors:
        use = _BI
    else:
        use = _CROSS
    lengths = {
        "context_tokens": config.max_context_tokens,
        "candidate_tokens": config.max_candidate_tokens,
        "pair_tokens": config.max_context_tokens + config.max_candidate_tokens - 1,
    }
    origin_line = f"`polyrank convert_model` made this folder of the model {origin}.\n"
    usage = use if kind == "ranker" else use.format(**lengths)
    return "\n".join(["# A converted ranker\n", origin_line, usage, _PRECISION])

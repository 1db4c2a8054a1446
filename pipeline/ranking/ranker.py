"""A trained ranker in Python: texts in, rankings, vectors and explanations out.

    from pipeline import Ranker

    ranker = Ranker.load("rankers/poly")
    print(ranker.rank(["hi !", "any plans for the weekend ?"], ["no", "i go skiing"], top_k=1))

No Ray, no service, no cluster; `serve/` answers with the same code. What is loaded when: nothing slow by
importing this module, torch and transformers by loading a ranker.

Axes: N contexts or texts, M vectors of a context, D dimensions, T tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeline.config import require
from pipeline.ranking import inputs
from pipeline.ranking.inputs import Context
from pipeline.ranking.results import Ranking, best_results

if TYPE_CHECKING:
    import torch

    from pipeline.arrays import Bools, Floats
    from pipeline.artifact import Artifact
    from pipeline.models.precision import Precision
    from pipeline.models.ranker import Ranker as RankerModule
    from pipeline.models.settings import RankerConfig

ItemT = TypeVar("ItemT")


class ContextVectors(NamedTuple):
    """The vectors of contexts."""

    vectors: Floats
    """[N, M, D] float32; a bi-encoder's M is 1."""
    mask: Bools
    """[N, M]; false for vectors that do not count, where a context has fewer tokens than M."""


class Explanation(NamedTuple):
    """Why a ranker with vectors scores candidates as it does."""

    tokens: list[str]
    """[T]: what the model has read of the context, special tokens included; joined they read as the text."""
    attention: Floats
    """[M, T] float32: how much each vector of the context (of a poly-encoder: each code) takes of each
    token. Rows add up to 1, those of vectors that do not count to 0."""
    weights: Floats
    """[C, M] float32: how much each of these vectors counts in each candidate's score. Rows add up to 1."""

    @property
    def token_weights(self) -> Floats:
        """[C, T] float32: how much of each token each candidate's score has seen, through all vectors."""
        weights: Floats = self.weights @ self.attention
        return weights


class Ranker:
    """A bi-, poly- or cross-encoder or a ConveRT model, loaded on this machine.

    Threads may share it. A context is a text, or a list of turns, oldest first and newest last; too long
    ones keep their newest tokens (ConveRT: the first ones of the newest turn). Whatever cannot be ranked
    ends in `BadInput`, whose message is one line.
    """

    def __init__(self, module: RankerModule, uri: str, artifact: Artifact | None = None) -> None:
        """Use `load` or `from_sentence_transformers`."""
        self.module = module
        """The torch module with its tokenizer and its settings."""
        self.uri = uri
        self.artifact = artifact
        """The artifact that a job has published; None: a plain folder."""

    @classmethod
    def load(cls, uri: str | Path, precision: Precision = "auto", device: str = "auto") -> Ranker:
        """Loads a ranker of jobs.finetune or jobs.convert_model, or a plain copy of its files.

        `uri`: a folder, here or in an object store (s3://…, gs://…), or `models:/name@alias` of MLflow's
        registry. `precision`: fp32, bf16, or auto, which is bf16 where the hardware multiplies it.
        `device`: cpu, cuda, or auto, which is a GPU that there is.

        Raises BadInput where there is no ranker, or where its files are damaged.

        >>> ranker = Ranker.load("rankers/poly")
        >>> ranker.architecture, ranker.dimensions
        ('poly', 16)
        >>> Ranker.load("rankers/none")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        pipeline.config.BadInput: .../rankers/none: not a ranker (manifest.json is missing)...
        """
        from pipeline.models.ranker import load_ranker
        from pipeline.ranking import files

        opened = files.open_ranker(str(uri))
        module = _prepare(load_ranker(opened.folder), precision, device)
        return cls(module, opened.uri, opened.artifact)

    @classmethod
    def from_sentence_transformers(
        cls,
        path: str | Path,
        max_context_tokens: int = 0,
        max_candidate_tokens: int = 0,
        precision: Precision = "auto",
        device: str = "auto",
    ) -> Ranker:
        """Loads what sentence-transformers saved: a bi-encoder, or a CrossEncoder of BERT.

        `path`: its folder, here or in an object store, or its name on the Hugging Face hub.
        `max_context_tokens`, `max_candidate_tokens`: longer texts are cut; 0: what the model takes. Its
        vectors are those of `SentenceTransformer.encode`; `jobs.convert_model` writes it as a ranker.

        Raises BadInput for a model that no ranker is equal to.
        """
        from pipeline.models.exchange import from_sentence_transformers
        from pipeline.ranking import files

        for name, value in (
            ("max_context_tokens", max_context_tokens),
            ("max_candidate_tokens", max_candidate_tokens),
        ):
            require(value >= 0, name, value, ">= 0")
        lengths = from_sentence_transformers.Lengths(max_context_tokens, max_candidate_tokens)
        folder = files.external_folder(str(path))
        module = from_sentence_transformers.load(folder, lengths)
        return cls(_prepare(module, precision, device), str(path))

    # What it is

    @property
    def config(self) -> RankerConfig:
        """Its settings, as in its `ranker.json`."""
        return self.module.config

    @property
    def architecture(self) -> str:
        """bi, poly, cross or convert."""
        return self.config.architecture

    @property
    def dimensions(self) -> int:
        """D of its vectors. Raises BadInput for a cross-encoder, which has none."""
        return self.module.dual.dimensions

    @property
    def precision(self) -> str:
        """The precision of computation: bf16 or fp32; scores and vectors are float32."""
        return str(self.module.precision)

    @cached_property
    def fingerprint(self) -> str:
        """Names the contents of its files; a pool names the one of the ranker that embedded it."""
        from pipeline.ranking import files

        return files.fingerprint(self.uri, self.artifact)

    def __repr__(self) -> str:
        device = self.module.device
        return f"Ranker({self.uri!r}, {self.architecture}, {self.precision} on {device})"

    # What it does

    def rank(
        self,
        context: Context,
        candidates: Iterable[str] | Mapping[str, str],
        top_k: int = 10,
    ) -> Ranking:
        """The best candidates, best first; all of them where there are fewer than `top_k`.

        `candidates`: texts, or texts by ids. Equal texts have equal scores.

        Raises BadInput for an empty context, no candidates, an empty one, and for what is no text.

        >>> ranker = Ranker.load("rankers/poly")
        >>> context = ["hi !", "do you like hot tea ?"]
        >>> ranking = ranker.rank(context, ["it rains", "i like tea", "no"], top_k=2)
        >>> [(result.index, result.text, round(result.score, 2)) for result in ranking]
        [(1, 'i like tea', 5.74), (2, 'no', 5.01)]
        >>> ranker.rank("tea ?", {"r1": "it rains", "r2": "tea , please"})[0].id
        'r2'
        >>> ranker.rank("tea ?", [])
        Traceback (most recent call last):
        pipeline.config.BadInput: candidates: none; allowed: one text at least
        """
        inputs.require_top_k(top_k)
        ids, texts = inputs.candidates(candidates)
        return Ranking(tuple(best_results(ids, texts, self.score(context, texts).tolist(), top_k)))

    def score(self, context: Context, candidates: Iterable[str]) -> Floats:
        """[C] float32: the scores of texts, in their order.

        Raises BadInput as `rank`.

        >>> Ranker.load("rankers/cross").score("do you like tea ?", ["yes", "no", "yes"]).shape
        (3,)
        """
        from pipeline.models import inference

        turns, (_, texts) = inputs.context(context), inputs.candidates(candidates)
        place_of_text = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        if self.config.has_vectors:
            vectors_1MD, mask_1M = inference.context_vectors(self.module, [turns])
            vectors_CD = inference.candidate_vectors(self.module, list(place_of_text))
            scores = inference.vector_scores(self.module, vectors_1MD[0], mask_1M[0], vectors_CD)
        else:
            (scores,) = inference.pair_scores(self.module, [turns], [list(place_of_text)])
        scores_C: Floats = _array(scores)[[place_of_text[text] for text in texts]]
        return scores_C

    def encode_contexts(
        self, contexts: Iterable[Context], progress: bool = False, batch_tokens: int = 0
    ) -> ContextVectors:
        """Vectors [N, M, D] and their mask [N, M] of N contexts, in their order.

        `progress`: shows a bar. `batch_tokens`: bounds a batch, padding included; 0: what suits the device.

        Raises BadInput for an empty context, what is no text, and for a cross-encoder, which has no vectors.

        >>> vectors, mask = Ranker.load("rankers/poly").encode_contexts(["tea ?", ["hi !", "tea ?"]])
        >>> vectors.shape, str(vectors.dtype), mask.all().item()
        ((2, 3, 16), 'float32', True)
        """
        import numpy as np

        from pipeline.models import inference

        self.config.require_vectors()
        turns = inputs.contexts(contexts)
        vectors: list[Floats] = [
            np.empty((0, self.config.vectors_per_context, self.dimensions), np.float32)
        ]
        masks: list[Bools] = [np.empty((0, self.config.vectors_per_context), bool)]
        for part, mask in self._in_windows(
            turns,
            self.module.context_rows,
            lambda rows: inference.context_row_vectors(self.module, rows, batch_tokens),
            "contexts" if progress else "",
        ):
            vectors.append(_array(part))
            masks.append(_array(mask))
        return ContextVectors(np.concatenate(vectors), np.concatenate(masks))

    def encode_candidates(
        self, texts: Iterable[str], progress: bool = False, batch_tokens: int = 0
    ) -> Floats:
        """[N, D] float32: the vectors of N candidate texts, in their order.

        As jobs.embed_pool makes them: sorted by length, in batches bounded by tokens, while the next texts
        are tokenised. `progress`, `batch_tokens` and BadInput as for `encode_contexts`.

        >>> ranker = Ranker.load("rankers/poly")
        >>> vectors = ranker.encode_candidates(["i like tea", "it rains"])
        >>> vectors.shape, str(vectors.dtype)
        ((2, 16), 'float32')
        >>> ranker.encode_candidates(["tea", 3])
        Traceback (most recent call last):
        pipeline.config.BadInput: texts[1]: 3 is not allowed; allowed: a text
        """
        import numpy as np

        from pipeline.models import inference

        self.config.require_vectors()
        text_list = inputs.texts(texts, "texts")
        vectors_ND = np.empty((len(text_list), self.dimensions), np.float32)
        start = 0
        for part in self._in_windows(
            text_list,
            self.module.candidate_rows,
            lambda rows: inference.row_vectors(self.module, rows, batch_tokens),
            "candidates" if progress else "",
        ):
            vectors_ND[start : start + len(part)] = _array(part)
            start += len(part)
        return vectors_ND

    def explain(self, context: Context, candidates: Iterable[str]) -> Explanation:
        """Which tokens each vector of the context attends to, and how much each counts for each candidate.

        Raises BadInput as `rank`, and for a cross-encoder, which has no vectors.

        >>> explanation = Ranker.load("rankers/poly").explain("hot tea ?", ["i like tea", "it rains"])
        >>> explanation.weights.shape, explanation.weights.sum(axis=1).round(3).tolist()
        ((2, 3), [1.0, 1.0])
        >>> len(explanation.tokens), explanation.tokens[0], explanation.tokens[-1].strip()
        (11, '[CLS]', '[SEP]')
        >>> explanation.attention.shape, explanation.token_weights.shape
        ((3, 11), (2, 11))
        """
        from pipeline.models import explanation, inference

        self.config.require_vectors()
        turns, (_, texts) = inputs.context(context), inputs.candidates(candidates)
        (row,) = self.module.context_rows([turns])
        vectors_1MD, mask_1M = inference.context_row_vectors(self.module, [row])
        vectors_CD = inference.candidate_vectors(self.module, texts)
        result = explanation.explain(self.module, row, vectors_1MD[0], mask_1M[0], vectors_CD)
        tokens, attention_MT = result.attended
        return Explanation(tokens, _array(attention_MT), _array(result.weights_CM))

    def _in_windows(
        self,
        items: Sequence[ItemT],
        tokenise: Callable[[Sequence[ItemT]], list[list[int]]],
        encode: Callable[[list[list[int]]], Any],
        label: str,
    ) -> Iterable[Any]:
        """The encoded items, some thousand at a time; `label`: of the bar, "": no bar."""
        from tqdm import tqdm

        from pipeline.models import inference

        with tqdm(total=len(items), desc=label, unit="text", disable=not label) as bar:
            for rows, vectors in inference.in_windows(items, tokenise, encode):
                yield vectors
                bar.update(len(rows))


def _prepare(module: RankerModule, precision: Precision, device: str) -> RankerModule:
    import torch

    from pipeline.models import inference
    from pipeline.tasks.resources import best_device

    require(precision in ("auto", "bf16", "fp32"), "precision", precision, "auto, bf16, fp32")
    if device == "auto":
        return inference.prepare(module, best_device(), precision)
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    require(device.partition(":")[0] in kinds, "device", device, ", ".join(("auto", *kinds)))
    return inference.prepare(module, torch.device(device), precision)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()

"""A trained ranker in Python: texts in, rankings, vectors and explanations out.

    from pipeline import Ranker

    ranker = Ranker.load("rankers/poly")
    print(ranker.rank(["hi !", "any plans for the weekend ?"], ["no", "i go skiing"], top_k=1))

It needs no Ray, no service and no cluster; `serve/` answers with the same code. Importing this module is
quick: torch and transformers are loaded with the first ranker.

Axes: N contexts or texts, M vectors of a context, D dimensions, T tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from pipeline.config import require
from pipeline.models.precision import Precision
from pipeline.ranking import inputs
from pipeline.ranking.inputs import Context, Where
from pipeline.ranking.results import Ranking, best_results, results_at
from pipeline.ranking.torch_defaults import with_torch_defaults

if TYPE_CHECKING:
    import torch

    from pipeline.arrays import Bools, Floats
    from pipeline.artifact import Artifact
    from pipeline.models.ranker import Ranker as RankerModule
    from pipeline.models.settings import RankerConfig
    from pipeline.pools.pool import Method, Pool

ItemT = TypeVar("ItemT")
_KEPT_NUMBERS = 1 << 24
"""Of the candidates' vectors that a ranker keeps: 64 MiB, 43,000 texts of 384 dimensions."""


class ContextVectors(NamedTuple):
    """The vectors of contexts."""

    vectors: Floats
    """[N, M, D] float32; a bi-encoder's M is 1."""
    mask: Bools
    """[N, M]; false for vectors that do not count, where a context has fewer tokens than M."""


class Explanation(NamedTuple):
    """The tokens and vectors of a context that the scores of candidates come from."""

    tokens: list[str]
    """[T]: the tokens that the model has read of the context, special tokens included. Joined, they read
    as the text."""
    attention: Floats
    """[M, T] float32: the attention of each vector of the context (of a poly-encoder: each code) to each
    token. A row adds up to 1, or to 0 for a vector that does not count."""
    weights: Floats
    """[C, M] float32: the weight of each of these vectors in each candidate's score. Rows add up to 1."""

    @property
    def token_weights(self) -> Floats:
        """[C, T] float32: the weight of each token in each candidate's score, summed over the vectors."""
        weights: Floats = self.weights @ self.attention
        return weights


class Ranker:
    """A bi-, poly- or cross-encoder or a ConveRT model, loaded on this machine.

    Threads may share it. A context is a text, or a list of turns, oldest first and newest last. A
    context that is too long keeps its newest tokens (ConveRT: the first tokens of the newest turn). Input
    that cannot be ranked raises `BadInput`, whose message is one line.
    """

    def __init__(self, module: RankerModule, uri: str, artifact: Artifact | None = None) -> None:
        """Use `load` or `from_sentence_transformers`."""
        self.module = module
        """The torch module with its tokenizer and its settings."""
        self.uri = uri
        self.artifact = artifact
        """The artifact that a job has published; None: a plain folder."""
        self._kept: tuple[Any, torch.Tensor] | None = None
        """What the vectors of the last candidates were made from, and the vectors."""

    @classmethod
    @with_torch_defaults
    def load(
        cls, uri: str | Path, precision: Precision = "auto", device: str | torch.device = "auto"
    ) -> Ranker:
        """Loads a ranker of jobs.finetune or jobs.convert_model, or a plain copy of its files.

        `uri`: a folder, here or in an object store (s3://…, gs://…), or `models:/name@alias` of MLflow's
        registry. `precision`: fp32, bf16, auto, which is bf16 where the hardware multiplies it, or int8.
        `device`: cpu, cuda, a torch.device, or auto, which is a GPU if there is one.

        Raises BadInput if there is no ranker at the URI, or if its files are damaged.

        >>> ranker = Ranker.load("rankers/poly")
        >>> ranker.architecture, ranker.dimensions
        ('poly', 16)
        >>> Ranker.load("rankers/none")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        pipeline.config.BadInput: .../rankers/none: not a ranker (there is no such folder)...
        """
        from pipeline.models.ranker import load_ranker
        from pipeline.ranking import ranker_files

        files = ranker_files.open_ranker(str(uri))
        module = _prepare(load_ranker(files.folder), precision, device)
        return cls(module, files.uri, files.artifact)

    @classmethod
    @with_torch_defaults
    def from_sentence_transformers(
        cls,
        path: str | Path,
        max_context_tokens: int = 0,
        max_candidate_tokens: int = 0,
        precision: Precision = "auto",
        device: str | torch.device = "auto",
        context_prompt: str | None = None,
        candidate_prompt: str | None = None,
    ) -> Ranker:
        """Loads a model that sentence-transformers saved: a bi-encoder, or a CrossEncoder.

        `path`: its folder, here or in an object store, or its name on the Hugging Face hub.
        `max_context_tokens`, `max_candidate_tokens`: longer texts are truncated; 0: as many as the model
        takes. `context_prompt`, `candidate_prompt`: the text before each context and candidate; None: what
        the model's configuration names. Some models, such as intfloat/e5-small-v2, name theirs ("query: ",
        "passage: ") only on their page. The vectors are those of `SentenceTransformer.encode_query` and
        `encode_document`. `jobs.convert_model` writes the model as a ranker.

        Raises BadInput for a model that a ranker cannot reproduce.
        """
        from pipeline.models.interop import sentence_transformers
        from pipeline.ranking import ranker_files

        for name, value in (
            ("max_context_tokens", max_context_tokens),
            ("max_candidate_tokens", max_candidate_tokens),
        ):
            require(isinstance(value, Integral) and value >= 0, name, value, "a whole number >= 0")
        lengths = sentence_transformers.Lengths(max_context_tokens, max_candidate_tokens)
        folder = ranker_files.external_folder(str(path))
        module = sentence_transformers.load(folder, lengths)
        prompts = {"context_prompt": context_prompt, "candidate_prompt": candidate_prompt}
        for name, prompt in prompts.items():
            require(prompt is None or isinstance(prompt, str), name, prompt, "a text")
        set_prompts: dict[str, Any] = {
            n: prompt for n, prompt in prompts.items() if prompt is not None
        }
        module.config = replace(module.config, **set_prompts)
        return cls(_prepare(module, precision, device), str(path))

    # Its properties

    @property
    def config(self) -> RankerConfig:
        """The settings of the ranker, as in its `ranker.json`."""
        return self.module.config

    @property
    def architecture(self) -> str:
        """bi, poly, cross or convert."""
        return self.config.architecture

    @property
    def dimensions(self) -> int:
        """D, the width of its vectors. Raises BadInput for a cross-encoder, which has no vectors."""
        return self.module.dual.dimensions

    @property
    def precision(self) -> str:
        """The precision of computation: bf16, fp32 or int8; scores and vectors are float32."""
        return str(self.module.precision)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the ranker's files. A pool stores the fingerprint of the ranker that embedded it."""
        from pipeline.ranking import ranker_files

        return ranker_files.fingerprint(self.uri, self.artifact)

    def __repr__(self) -> str:
        device = self.module.device
        return f"Ranker({self.uri!r}, {self.architecture}, {self.precision} on {device})"

    # Rankings and vectors

    def rank(
        self, context: Context, candidates: Iterable[str] | Mapping[str, str], top_k: int = 10
    ) -> Ranking:
        """The best `top_k` candidates, best first; all of them if there are fewer.

        `candidates`: texts, or texts by ids. Equal texts have equal scores. The ranker keeps the vectors of
        the last candidates (up to 64 MiB), so the next question about the same ones encodes no candidate.

        Raises BadInput if the context is empty, if there are no candidates, and if a text is empty or not a
        text.

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

    @with_torch_defaults
    def search(
        self,
        pool: Pool,
        context: Context,
        top_k: int = 10,
        *,
        where: Where | None = None,
        allow: Collection[str] | None = None,
        deny: Collection[str] | None = (),
        method: Method = "auto",
    ) -> Ranking:
        """The best `top_k` candidates for a context, best first; all of them if there are fewer.

        `pool`: embedded by this ranker. `context`: a text, or turns, oldest first. `where`: columns that the
        pool keeps (`--embed.filter-columns`), and the value or the values that a candidate may have there.
        `allow`: ids of the only candidates that count, `deny`: of those that do not. `method`: approximate
        needs an index of neighbours; the answer of all others is certified.

        Raises BadInput for a pool of another ranker, an empty context, and a column that the pool does not
        keep.

        >>> from pipeline import Pool
        >>> ranker, pool = Ranker.load("rankers/poly"), Pool.open("pools/replies")
        >>> ranking = ranker.search(pool, ["hi !", "do you like tea ?"], top_k=3)
        >>> len(ranking), ranking.certified
        (3, True)
        >>> [result.id for result in ranker.search(pool, "tea ?", allow=["r1", "r3"])]
        ['r1', 'r3']
        >>> ranker.search(pool, "tea ?", where={"lang": "en"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        pipeline.config.BadInput: where: 'lang' is not allowed; allowed: columns that the pool keeps ...
        """
        from pipeline.search import filters, top_rows

        inputs.require_top_k(top_k)
        inputs.context(context)
        require(hasattr(pool, "require_model"), "pool", pool, "what Pool.open returns")
        pool.require_model(self)
        among = None
        # Arrays and series of ids have no truth value.
        deny = () if deny is None else deny
        if where or allow is not None or not isinstance(deny, Collection) or len(deny):
            among = filters.select(pool, allow, deny, where)
            if not among.any():
                return Ranking(())
        vectors_1MD, mask_1M = self.encode_contexts([context])
        attention = self.config.search_attention
        answers = top_rows(pool, vectors_1MD, top_k, mask_1M, attention, method, among)
        results = results_at(pool, answers.places[0], answers.scores[0])
        return Ranking(tuple(results), bool(answers.certified[0]))

    @with_torch_defaults
    def score(self, context: Context, candidates: Iterable[str]) -> Floats:
        """[C] float32: the scores of texts, in their order.

        Raises BadInput as `rank` does.

        >>> Ranker.load("rankers/cross").score("do you like tea ?", ["yes", "no", "yes"]).shape
        (3,)
        """
        from pipeline.models import inference

        turns, (_, texts) = inputs.context(context), inputs.candidates(candidates)
        place_of_text = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        if self.config.has_vectors:
            vectors_1MD, mask_1M = inference.context_vectors(self.module, [turns])
            vectors_CD = self._candidate_vectors(list(place_of_text))
            scores = inference.vector_scores(self.module, vectors_1MD[0], mask_1M[0], vectors_CD)
        else:
            (scores,) = inference.pair_scores(self.module, [turns], [list(place_of_text)])
        scores_C: Floats = _array(scores)[[place_of_text[text] for text in texts]]
        return scores_C

    def _candidate_vectors(self, texts: list[str]) -> torch.Tensor:
        """[C, D]; those of the last call if its texts, the settings and the weights were the same."""
        from pipeline.models import inference

        module, kept = self.module, self._kept  # read once: threads may share the ranker
        tensors = chain(module.parameters(), module.buffers())
        weights = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        source = (texts, self.config, self.precision, weights)
        if kept is not None and kept[0] == source:
            return kept[1]
        vectors_CD = inference.candidate_vectors(module, texts)
        self._kept = (source, vectors_CD) if vectors_CD.numel() <= _KEPT_NUMBERS else None
        return vectors_CD

    @with_torch_defaults
    def encode_contexts(
        self, contexts: Iterable[Context], progress: bool = False, batch_tokens: int = 0
    ) -> ContextVectors:
        """Vectors [N, M, D] and their mask [N, M] of N contexts, in their order.

        `progress`: shows a bar. `batch_tokens`: the most tokens of a batch, padding included; 0: as many as
        suit the device.

        Raises BadInput if a context is empty or not a text, and for a cross-encoder, which has no vectors.

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

    @with_torch_defaults
    def encode_candidates(
        self, texts: Iterable[str], progress: bool = False, batch_tokens: int = 0
    ) -> Floats:
        """[N, D] float32: the vectors of N candidate texts, in their order.

        They are made as in jobs.embed_pool: texts are sorted by length and encoded in batches bounded by
        tokens, while the next texts are tokenised. `progress`, `batch_tokens` and BadInput: as for
        `encode_contexts`.

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

    @with_torch_defaults
    def explain(self, context: Context, candidates: Iterable[str]) -> Explanation:
        """The attention of each vector of the context to the tokens, and its weight for each candidate.

        Raises BadInput as `rank` does, and for a cross-encoder, which has no vectors.

        >>> explanation = Ranker.load("rankers/poly").explain("hot tea ?", ["i like tea", "it rains"])
        >>> explanation.weights.shape, explanation.weights.sum(axis=1).round(3).tolist()
        ((2, 3), [1.0, 1.0])
        >>> len(explanation.tokens), explanation.tokens[0], explanation.tokens[-1].strip()
        (11, '[CLS]', '[SEP]')
        >>> explanation.attention.shape, explanation.token_weights.shape
        ((3, 11), (2, 11))
        """
        from pipeline.models import inference

        self.config.require_vectors()
        turns, (_, texts) = inputs.context(context), inputs.candidates(candidates)
        (row,) = self.module.context_rows([turns])
        vectors_1MD, mask_1M = inference.context_row_vectors(self.module, [row])
        vectors_CD = self._candidate_vectors(texts)
        tokens, *weights = inference.explain(
            self.module, row, vectors_1MD[0], mask_1M[0], vectors_CD
        )
        return Explanation(tokens, *map(_array, weights))

    def _in_windows(
        self,
        items: Sequence[ItemT],
        tokenise: Callable[[Sequence[ItemT]], list[list[int]]],
        encode: Callable[[list[list[int]]], Any],
        label: str,
    ) -> Iterable[Any]:
        """Yields the encoded items, some thousand at a time. `label`: the label of the bar; "": no bar."""
        from tqdm import tqdm

        from pipeline.models import inference

        with tqdm(total=len(items), desc=label, unit="text", disable=not label) as bar:
            for rows, vectors in inference.in_windows(items, tokenise, encode):
                yield vectors
                bar.update(len(rows))


def _prepare(
    module: RankerModule, precision: Precision, device: str | torch.device
) -> RankerModule:
    import torch

    from pipeline.engine.resources import best_device
    from pipeline.models import inference

    names = get_args(Precision)
    require(precision in names, "precision", precision, ", ".join(names))
    name = str(device)
    if name == "auto":
        return inference.prepare(module, best_device(), precision)
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    require(name.partition(":")[0] in kinds, "device", name, ", ".join(("auto", *kinds)))
    return inference.prepare(module, torch.device(name), precision)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()

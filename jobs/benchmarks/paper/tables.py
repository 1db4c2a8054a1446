"""The tables of the Poly-encoder paper: their models and numbers.

2  negatives, bi-encoder                   R@1/20, ConvAI2 valid
3  which layers are trained, bi and cross  R@1/20, ConvAI2 valid
4  bi, poly and cross on four tasks        R@1, test
6  the same: hours of training             on 8 V100
7  reduction, bi-encoder                   R@1/20, ConvAI2 valid
8  kinds and numbers of context vectors    R@1, ConvAI2 and DSTC7 valid
distill: poly-64 from a cross-encoder      not the paper's; a corpus of jobs.score_candidates
encoders: bi and cross from several ones   as table 4 compares BERT's, Wikipedia's and Reddit's weights

From BERT's weights (Wikipedia in table 4, where those are not published: from the authors' Reddit ones).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipeline.config import require

Number = Literal[2, 3, 4, 6, 7, 8, "distill", "encoders"]


class Published(NamedTuple):
    """A number of the paper."""

    value: float
    deviation: float | None = None
    """Standard deviation over the paper's seeds."""


@dataclass(frozen=True)
class Trial:
    """One row: a recipe, and the changes to it."""

    name: str
    architecture: Literal["bi", "poly", "cross"]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of jobs.finetune. A batch of another size than the recipe's gets a learning rate that goes
    with the square root of its size."""
    published: Mapping[str, Published] = field(default_factory=dict)
    """By task: R@1, or in table 6 minutes."""
    tasks_without: tuple[str, ...] = ()
    """Tasks without this trial."""


@dataclass(frozen=True)
class Table:
    """Rows, and which of them are compared."""

    title: str
    trials: tuple[Trial, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    """Names of trials: does the first find more right ones than the second?"""
    figure: Literal["R@1", "minutes"] = "R@1"


def _percent(**by_task: float | tuple[float, float]) -> dict[str, Published]:
    """81.7, or (81.7, 0.2) with the deviation, as shares."""
    pairs = {
        task: value if isinstance(value, tuple) else (value, None)
        for task, value in by_task.items()
    }
    return {
        task: Published(round(value / 100, 4), None if deviation is None else deviation / 100)
        for task, (value, deviation) in pairs.items()
    }


def _hours(convai2: float, dstc7: float, ubuntu: float) -> dict[str, Published]:
    hours = {"convai2": convai2, "dstc7": dstc7, "ubuntu": ubuntu}
    return {task: Published(60 * value) for task, value in hours.items()}


def _poly(m: int) -> dict[str, Any]:
    return {"ranker.m": m}


def _negatives(count: int, published: float) -> Trial:
    # In chunks, so that memory does not grow with the batch.
    chunk = 32 if count + 1 > 32 else 0
    changes = {"finetune.batch_examples": count + 1, "finetune.chunk_examples": chunk}
    return Trial(str(count), "bi", changes, _percent(convai2=published))


def _layers(architecture: Literal["bi", "cross"], layers: str, published: float) -> Trial:
    changes = {"finetune.train_layers": layers}
    return Trial(f"{architecture}-{layers}", architecture, changes, _percent(convai2=published))


def _distillation(name: str, loss: str) -> Trial:
    changes = {"finetune.negatives_from": "both", "finetune.distill.loss": loss}
    return Trial(name, "poly", {**_poly(64), **changes})


def _kinds(
    m: int, kinds: Mapping[str, tuple[tuple[float, float], tuple[float, float]]]
) -> tuple[Trial, ...]:
    return tuple(
        Trial(
            f"{kind}-{m}",
            "poly",
            {**_poly(m), "ranker.context_codes": kind},
            _percent(convai2=convai2, dstc7=dstc7),
        )
        for kind, (convai2, dstc7) in kinds.items()
    )


def of_encoders(uris: Sequence[str]) -> Table:
    """A bi- and a cross-encoder from each encoder, named after its folder; all are compared with the first.

    Raises BadInput for two of one name.
    """
    names = {uri.rstrip("/").rpartition("/")[2]: uri for uri in uris}
    require(len(names) == len(uris), "encoder", tuple(uris), "folders of different names")
    first, *other_names = names
    kinds: tuple[Literal["bi"], Literal["cross"]] = ("bi", "cross")
    return Table(
        "pre-trained encoders",
        tuple(
            Trial(f"{kind}-{name}", kind, {"encoder": uri})
            for kind in kinds
            for name, uri in names.items()
        ),
        tuple((f"{kind}-{other}", f"{kind}-{first}") for kind in kinds for other in other_names),
    )


TABLES: dict[Number, Table] = {
    2: Table(
        "negatives",
        (_negatives(31, 81.0), _negatives(63, 81.7), _negatives(127, 82.3), _negatives(255, 83.0),
         _negatives(511, 83.3)),
        pairs=(("511", "31"),),
    ),
    3: Table(
        "trained layers",
        (_layers("bi", "top", 74.2), _layers("bi", "top4", 82.0),
         _layers("bi", "all_but_embeddings", 83.3), _layers("bi", "all", 83.0),
         _layers("cross", "top", 80.6), _layers("cross", "top4", 86.3),
         _layers("cross", "all_but_embeddings", 87.3), _layers("cross", "all", 86.6)),
        pairs=(("bi-all", "bi-all_but_embeddings"), ("cross-all", "cross-all_but_embeddings")),
    ),
    4: Table(
        "models",
        (Trial("bi", "bi", {}, _percent(
            convai2=(81.7, 0.2), dstc7=(66.8, 0.7), ubuntu=(80.6, 0.4), wikipedia=71.0)),
         Trial("poly-16", "poly", _poly(16), _percent(
            convai2=(83.2, 0.1), dstc7=(67.8, 0.3), ubuntu=(81.2, 0.2), wikipedia=71.5)),
         Trial("poly-64", "poly", _poly(64), _percent(
            convai2=(83.7, 0.2), dstc7=(67.0, 0.9), ubuntu=(81.3, 0.2), wikipedia=71.3)),
         Trial("poly-360", "poly", _poly(360), _percent(
            convai2=(83.7, 0.2), dstc7=(68.9, 0.4), ubuntu=(80.9, 0.0), wikipedia=71.8)),
         # 10,001 pairs for each question: the paper has none there either.
         Trial("cross", "cross", {}, _percent(
            convai2=(84.8, 0.3), dstc7=(67.4, 0.7), ubuntu=(82.8, 0.3)), ("wikipedia",))),
        pairs=(("poly-64", "bi"), ("cross", "poly-64")),
    ),
    6: Table(
        "training time",
        (Trial("bi", "bi", {}, _hours(2.0, 4.9, 7.9)),
         Trial("poly-16", "poly", _poly(16), _hours(2.7, 5.5, 8.0)),
         Trial("poly-64", "poly", _poly(64), _hours(2.8, 5.7, 8.0)),
         Trial("cross", "cross", {}, _hours(9.4, 13.5, 39.9), ("wikipedia",))),
        figure="minutes",
    ),
    7: Table(
        "reduction",
        (Trial("first", "bi", {"ranker.reduction": "first"}, _percent(convai2=83.3)),
         *(Trial(f"mean_first_{m}", "bi", {"ranker.reduction": "mean_first_m", "ranker.reduction_m": m},
                 _percent(convai2=value)) for m, value in ((16, 82.9), (64, 82.7))),
         Trial("mean", "bi", {"ranker.reduction": "mean"}, _percent(convai2=83.1))),
        pairs=(("mean", "first"),),
    ),
    8: Table(
        "context vectors",
        (*_kinds(1, {"learnt": ((81.9, .3), (56.2, .1)), "first_m": ((83.2, .2), (56.4, .3)),
                     "last_m": ((82.9, .1), (56.1, .4))}),
         *_kinds(4, {"learnt": ((83.8, .2), (56.5, .5)), "first_m": ((83.4, .2), (56.9, .5)),
                     "last_m": ((82.8, .2), (56.0, .5)), "last_m_and_first": ((82.9, .1), (55.8, .3))}),
         *_kinds(16, {"learnt": ((84.4, .1), (57.7, .2)), "first_m": ((85.2, .1), (56.1, 1.7)),
                      "last_m": ((83.9, .2), (56.1, .3)), "last_m_and_first": ((83.8, .3), (56.1, .3))}),
         *_kinds(64, {"learnt": ((84.9, .1), (58.3, .4)), "first_m": ((86.0, .2), (57.7, .6)),
                      "last_m": ((84.9, .3), (57.0, .2)), "last_m_and_first": ((85.0, .2), (57.3, .3))}),
         *_kinds(360, {"learnt": ((85.3, .3), (57.7, .3)), "first_m": ((86.3, .1), (58.1, .4)),
                       "last_m": ((86.3, .1), (58.0, .4)), "last_m_and_first": ((86.2, .3), (58.3, .4))})),
        pairs=(("first_m-64", "learnt-64"),),
    ),
    "distill": Table(
        "distillation from a cross-encoder into poly-64",
        # Without a teacher: from the batch's responses, and from the corpus' candidates too.
        (Trial("poly-64", "poly", _poly(64)), _distillation("poly-64-both", "none"),
         _distillation("poly-64-kl", "kl"), _distillation("poly-64-margin_mse", "margin_mse")),
        pairs=(("poly-64-kl", "poly-64"), ("poly-64-kl", "poly-64-both"),
               ("poly-64-margin_mse", "poly-64"), ("poly-64-margin_mse", "poly-64-both")),
    ),
}  # fmt: skip

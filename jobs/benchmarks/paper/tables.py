"""Tables of the Poly-encoder paper that are measured here: their models and numbers.

4  bi, poly and cross on four tasks        R@1, test
distill: poly-64 from a cross-encoder      not the paper's; a corpus of jobs.score_candidates
encoders: bi and cross from several ones   as table 4 compares BERT's, Wikipedia's and Reddit's weights

From BERT's weights (Wikipedia in table 4, where those are not published: from the authors' Reddit ones).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline import storage

Number = Literal[4, "distill", "encoders"]


@dataclass(frozen=True)
class Trial:
    """One row: a recipe, and the changes to it."""

    name: str
    architecture: Literal["bi", "poly", "cross"]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of jobs.finetune."""
    published: Mapping[str, float] = field(default_factory=dict)
    """The paper's R@1 in percent, by task."""
    tasks_without: tuple[str, ...] = ()
    """Tasks without this trial."""

    def published_for(self, task: str) -> float | None:
        """R@1. StarSpace's articles are the paper's Wikipedia search."""
        percent = self.published.get("wikipedia" if task == "starspace" else task)
        return None if percent is None else round(percent / 100, 4)


@dataclass(frozen=True)
class Table:
    """Rows, and which of them are compared."""

    trials: tuple[Trial, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    """Names of trials: does the first find more right ones than the second?"""


def _percent(convai2: float, dstc7: float, ubuntu: float, **more: float) -> dict[str, float]:
    return {"convai2": convai2, "dstc7": dstc7, "ubuntu": ubuntu, **more}


def _poly(m: int) -> dict[str, Any]:
    return {"ranker.m": m}


def _distillation(name: str, loss: str) -> Trial:
    changes = {"finetune.negatives_from": "both", "finetune.distill.loss": loss}
    return Trial(name, "poly", {**_poly(64), **changes})


def of_encoders(uris: Sequence[str]) -> Table:
    """A bi- and a cross-encoder from each encoder, named after its folder, to compare with the first."""
    names = {storage.name_of(uri): uri for uri in uris}
    first, *other_names = names
    kinds: tuple[Literal["bi"], Literal["cross"]] = ("bi", "cross")
    return Table(
        tuple(
            Trial(f"{kind}-{name}", kind, {"encoder": uri})
            for kind in kinds
            for name, uri in names.items()
        ),
        tuple((f"{kind}-{other}", f"{kind}-{first}") for kind in kinds for other in other_names),
    )


TABLES: dict[Number, Table] = {
    4: Table(
        (Trial("bi", "bi", {}, _percent(81.7, 66.8, 80.6, wikipedia=71.0)),
         Trial("poly-16", "poly", _poly(16), _percent(83.2, 67.8, 81.2, wikipedia=71.5)),
         Trial("poly-64", "poly", _poly(64), _percent(83.7, 67.0, 81.3, wikipedia=71.3)),
         Trial("poly-360", "poly", _poly(360), _percent(83.7, 68.9, 80.9, wikipedia=71.8)),
         # 10,001 pairs for each question: the paper has none there either.
         Trial("cross", "cross", {}, _percent(84.8, 67.4, 82.8), ("wikipedia",))),
        pairs=(("poly-64", "bi"), ("cross", "poly-64")),
    ),
    "distill": Table(
        # Without a teacher: from the batch's responses, and from the corpus' candidates too.
        (Trial("poly-64", "poly", _poly(64)), _distillation("poly-64-both", "none"),
         _distillation("poly-64-kl", "kl"), _distillation("poly-64-margin_mse", "margin_mse")),
        pairs=(("poly-64-kl", "poly-64"), ("poly-64-kl", "poly-64-both"),
               ("poly-64-margin_mse", "poly-64"), ("poly-64-margin_mse", "poly-64-both")),
    ),
}  # fmt: skip

"""How each public task is evaluated, so that numbers compare with published ones.

convai2     the reply among the 20 given                         R@1/20
dstc7       the reply among the 100 given (sub-task 4: 101,      R@1/100, R@10, R@50, MRR
            with NONE ranked like any other; fewer where an
            example has several right answers)
ubuntu      the reply among the 10 given                         R@1/10, R@2, R@5, MRR
wikipedia   the article among it and 10,000 fixed others         R@1/10001
polyai      1-of-100: the other responses of blocks of 100       R@1/100
labels      classification: the response is a label, and all     R@1 (the accuracy), MRR
            labels of the split are candidates
pairs       a FAQ: the answer among all answers of the corpus,   R@1, R@3, MRR
            those of train and valid, too, as a pool has them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.artifact import Artifact
from pipeline.evaluation.questions import CandidateSource

Name = Literal["convai2", "dstc7", "ubuntu", "wikipedia", "polyai", "labels", "pairs"]

ALL = 1_000_000_000
"""More candidates than any corpus has."""


@dataclass(frozen=True)
class Protocol:
    """Where candidates come from, how many there are, and what is counted."""

    source: CandidateSource
    candidates: int
    """C, the right one among them; `ALL`: every response of the split, or of the corpus."""
    recall_at: tuple[int, ...]


PROTOCOLS: dict[Name, Protocol] = {
    "convai2": Protocol("given", 20, (1, 2, 5, 10)),
    "dstc7": Protocol("given", 100, (1, 10, 50)),
    "ubuntu": Protocol("given", 10, (1, 2, 5)),
    "wikipedia": Protocol("others", 10_001, (1, 10, 100)),
    "polyai": Protocol("blocks", 100, (1,)),
    "labels": Protocol("sampled", ALL, (1,)),
    "pairs": Protocol("corpus", ALL, (1, 3)),
}
_OF_FORMAT: dict[str, Name] = {
    "dstc7": "dstc7", "ubuntu": "ubuntu", "reddit": "polyai", "amazonqa": "polyai",
    "opensubtitles": "polyai", "banking77": "labels", "clinc150": "labels", "hwu64": "labels",
    "snips": "labels", "pairs": "pairs",
}  # fmt: skip


def of_corpus(corpus: Artifact) -> Name:
    """The protocol of the data set that a corpus was made from."""
    if corpus.files("others/", ".parquet"):
        return "wikipedia"
    return _OF_FORMAT.get(corpus.manifest["config"].get("format", ""), "convai2")

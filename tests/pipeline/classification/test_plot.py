"""The picture of confusions."""

from __future__ import annotations

import torch

from pipeline.classification import evaluation
from pipeline.classification.texts import Labelled


def test_names_of_intents_are_no_formulas():
    labels = ("top_up_$_#_$", r"a\$b", "plain")
    texts = [Labelled("text", label) for label in labels]
    given = evaluation.answers(texts, torch.eye(3), labels)
    assert evaluation.plot(given, labels).startswith(b"\x89PNG")

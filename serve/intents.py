"""A loaded classifier of intents, which classifies texts in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.artifact import Artifact
from pipeline.classification.classifier import Classified, open_classifier
from pipeline.classification.encoder import FrozenEncoder
from pipeline.engine.resources import best_device
from pipeline.models.precision import Precision
from pipeline.models.ranker import Ranker
from serve.batcher import Stage


class Intents:
    """A head and its encoder, which may be the served ranker."""

    def __init__(
        self, uri: str, model: Artifact, ranker: Ranker, precision: Precision, batch_tokens: float
    ) -> None:
        """`ranker`: the loaded `model`. It is the encoder if the head was trained on it.

        Raises BadInput if `uri` is no classifier, or if its encoder has gone or was replaced.
        """
        self.artifact, self.classifier = open_classifier(uri)
        if self.classifier.encoder_fingerprint == model.fingerprint:
            ranker.config.require_vectors()
            self.encoder = FrozenEncoder(ranker, self.classifier.encode)
        else:
            head = replace(
                self.classifier, encode=replace(self.classifier.encode, precision=precision)
            )
            self.encoder = head.load_encoder(best_device())
        self.stage = Stage("intents", self._classify, batch_tokens)
        self.stage.run(self.rows(["warm up"]))

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, which are the rows of `stage`."""
        return self.encoder.rows(texts)

    def _classify(self, rows: Sequence[Sequence[int]]) -> list[Classified]:
        return self.classifier.classify(self.encoder.row_vectors(rows))

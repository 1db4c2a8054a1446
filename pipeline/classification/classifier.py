"""A trained head: its files, and its answers.

    classifier.json     its settings, the intents in the order of the head's outputs, the threshold, the
                        encoder's URI and fingerprint
    head.safetensors    the weights
    report.json         how well it does
    confusion.png       the same as a picture

Weights are safetensors, so that loading a head never runs code of its maker. The encoder stays where it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights
from torch import Tensor

from pipeline.artifact import Artifact, open_artifact
from pipeline.classification import encoder
from pipeline.classification.encoder import FrozenEncoder
from pipeline.classification.head import Head
from pipeline.classification.settings import KIND, EncodeConfig, HeadConfig
from pipeline.config import BadInput, from_dict, require
from pipeline.models.sources import Source, open_text_encoder

SETTINGS, WEIGHTS = "classifier.json", "head.safetensors"


@dataclass(frozen=True)
class Classified:
    """A classifier's answer to one text."""

    intents: list[tuple[str, float]]
    """All intents and their probabilities, the likeliest first; of equal ones the first by name."""
    out_of_scope: bool
    """Whether the best probability is below the threshold."""


@dataclass(frozen=True)
class Classifier:
    """A head with the names of its intents."""

    head: Head
    labels: tuple[str, ...]
    """The intents, in the order of the head's outputs."""
    threshold: float
    """Texts whose best probability is below it are out of scope; 0: none is."""
    encode: EncodeConfig
    config: HeadConfig
    encoder_uri: str
    encoder_fingerprint: str

    def files(self) -> dict[str, bytes]:
        """The classifier's files by name."""
        settings = {
            "labels": list(self.labels),
            "threshold": self.threshold,
            "encoder": {"uri": self.encoder_uri, "fingerprint": self.encoder_fingerprint},
            "encode": asdict(self.encode),
            "head": asdict(self.config),
            "features": self.head.hidden.in_features,
        }
        weights = {
            name: value.detach().cpu().contiguous()
            for name, value in self.head.state_dict().items()
        }
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        return {SETTINGS: text.encode(), WEIGHTS: save_weights(weights)}

    def probabilities(self, vectors_NF: Tensor) -> Tensor:
        """[N, C] of the encoder's vectors, on the CPU."""
        with torch.inference_mode():
            probabilities_NC: Tensor = self.head(vectors_NF)
            return probabilities_NC

    def classify(self, vectors_NF: Tensor) -> list[Classified]:
        """The answers to texts with these vectors."""
        probabilities_NC = self.probabilities(vectors_NF)
        values_NC, places_NC = probabilities_NC.sort(dim=1, descending=True, stable=True)
        answers = []
        for places, values in zip(places_NC.tolist(), values_NC.tolist(), strict=True):
            labels = [self.labels[place] for place in places]
            intents = list(zip(labels, values, strict=True))
            answers.append(Classified(intents, values[0] < self.threshold))
        return answers

    def open_encoder(self) -> Source:
        """The model whose vectors the head was trained on.

        Raises BadInput where it is gone, or another model lies there.
        """
        source, reference = open_text_encoder(self.encoder_uri)
        if reference["fingerprint"] != self.encoder_fingerprint:
            raise BadInput(f"{self.encoder_uri}: the encoder is {reference['fingerprint']} now; the head was "
                           f"trained on {self.encoder_fingerprint}")  # fmt: skip
        return source

    def load_encoder(self, on: torch.device) -> FrozenEncoder:
        """As `open_encoder`, loaded, on a device."""
        return encoder.load(self.open_encoder().local(), self.encode, on)


def open_classifier(uri: str) -> tuple[Artifact, Classifier]:
    """A published head.

    Raises BadInput if there is none, or if it is damaged.
    """
    artifact = open_artifact(uri, KIND)
    return artifact, load(artifact.local())


def load(folder: Path) -> Classifier:
    """The head of a folder. Raises BadInput for what is missing or does not fit together."""
    path = folder / SETTINGS
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        labels = tuple(values["labels"])
        config, encode = from_dict(HeadConfig, values["head"]), values["encode"]
        head = Head(values["features"], config.hidden, len(labels))
        encoder_reference = values["encoder"]
        classifier = Classifier(
            head, labels, float(values["threshold"]), from_dict(EncodeConfig, encode), config,
            str(encoder_reference["uri"]), str(encoder_reference["fingerprint"]),
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise BadInput(f"{path}: not the settings of a classifier ({error!r})") from None
    weights = folder / WEIGHTS
    try:
        head.load_state_dict(load_weights(weights.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{weights}: not the weights of {SETTINGS} beside it ({reason})") from None
    head.eval()
    require(len(labels) >= 2, str(path), labels, "two intents at least")
    return classifier

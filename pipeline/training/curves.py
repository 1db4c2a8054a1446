"""Draws the curves of a training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]
"""(step, value), in the order of the steps."""

_PANELS = (
    ("loss (nats)", ("loss", "mlm_loss", "next_loss", "valid_loss", "valid_mlm_loss", "valid_next_loss")),
    ("accuracy", ("mlm_accuracy", "next_accuracy", "accuracy", "valid_mlm_accuracy",
                  "valid_next_accuracy", "valid_r1")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("gradient_norm",)),
)  # fmt: skip

NAMES = tuple(name for _, names in _PANELS for name in names)
"""The metrics that `draw` shows."""


def draw(curves: Mapping[str, Curve], title: str) -> bytes:
    """A PNG with a panel for losses, accuracies, the rate and the gradient's norm; validations are dots."""
    panels = [(label, [name for name in names if curves.get(name)]) for label, names in _PANELS]
    panels = [(label, names) for label, names in panels if names]
    figure = Figure(figsize=(6.4 * max(1, len(panels)) / 1.6, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for place, (label, names) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for name in names:
            steps, values = zip(*curves[name], strict=True)
            style = "o-" if name.startswith("valid_") else "-"
            axes.plot(steps, values, style, markersize=3, linewidth=1, label=name)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=9)
        axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()

"""Shows the progress of a job: bars for a person, or JSON for a machine (`--progress json`).

Each event is one line of standard error that begins with "{". Other lines are messages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast, get_args

from tqdm import tqdm

Mode = Literal["bar", "json", "none"]
VARIABLE = "POLYRANK_PROGRESS"
_EVENT_SECONDS = 1.0
_SILENT_SECONDS = 2.0
"""Work that ends by then shows no bar."""


class Bar(Protocol):
    """The progress so far, of a total."""

    n: float

    def update(self, n: float = 1) -> object:
        """Counts `n` more."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> object:
        """More to show with the next update."""


def mode() -> Mode:
    value = os.environ.get(VARIABLE, "bar")
    return cast(Mode, value) if value in get_args(Mode) else "bar"


def event(name: str, **facts: Any) -> None:
    """Prints an event as JSON, if a machine listens; nothing is printed for a person."""
    if mode() == "json":
        line = json.dumps(
            {"event": name, "time": round(time.time(), 3), **facts}, ensure_ascii=False
        )
        print(line, file=sys.stderr, flush=True)


@contextmanager
def bar(
    label: str, total: float | None, initial: float = 0, unit: str = "task", hidden: bool = False
) -> Iterator[Bar]:
    """Shows how much of a stage is done. `label`: "" shows nothing. `total`: None if not known yet. `hidden`:
    not to a person."""
    if label and mode() == "json":
        events = _Events(label, total, initial, unit)
        try:
            yield events
        finally:
            events.emit()
        return
    is_scaled = unit not in ("task", "step", "file", "share", "trial")
    with tqdm(
        desc=label, total=total, initial=int(initial), unit=f" {unit}s" if is_scaled else unit,
        unit_scale=is_scaled, disable=hidden or not label or mode() == "none", delay=_SILENT_SECONDS,
        **_size(),
    ) as progress_bar:  # fmt: skip
        yield progress_bar


def _size() -> dict[str, Any]:
    """Of a terminal that says 0, as that of `script`, `docker run -t` or `ssh -tt` may: tqdm would show
    nothing there. {}: as the terminal says."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal
        return {}
    return {} if columns else {"ncols": 100, "nrows": 20}


class _Events:
    """A stage's `progress` events: the first, the last, and at most one a second between them."""

    def __init__(self, label: str, total: float | None, initial: float, unit: str) -> None:
        self.n = initial
        self._facts = {"stage": label, "total": total, "unit": unit}
        self._text = ""
        self._began = time.monotonic()
        self.emit()

    def update(self, n: float = 1) -> None:
        self.n += n
        if time.monotonic() - self._emitted_at >= _EVENT_SECONDS:
            self.emit()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self._text = s

    def emit(self) -> None:
        self._emitted_at = time.monotonic()
        seconds = round(self._emitted_at - self._began, 1)
        text = {"text": self._text} if self._text else {}
        event("progress", **self._facts, done=self.n, seconds=seconds, **text)

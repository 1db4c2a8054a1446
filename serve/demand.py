"""Which sender asks for most of a replica's work while others are there. No HTTP, no Ray."""

from __future__ import annotations

import threading

_DOMINANT_SHARE = 2 / 3  # of what all senders ask for
_PRESENT_S = 2.0
"""For which a sender is there after a request. What it asked for counts half after so long."""
_SENDERS = 100  # that are known; more are hardly ever there at once


class Demand:
    """What each sender asks for, also in vain. Any thread may call its methods; `now` is in seconds."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, float]] = {}
        """By sender, the latest at the end: (cost, when it was added up)."""
        self._lock = threading.Lock()

    def add(self, sender: str, cost: float, now: float) -> None:
        with self._lock:
            asked, then = self._asked.pop(sender, (0.0, now))
            self._asked[sender] = asked * _decay(now - then) + cost, now
            if len(self._asked) > _SENDERS:
                del self._asked[next(iter(self._asked))]

    def dominant_sender(self, now: float) -> str | None:
        """The sender that asks for over two thirds while others are there, if any."""
        with self._lock:
            asked = {
                sender: cost * _decay(now - then)
                for sender, (cost, then) in self._asked.items()
                if now - then < _PRESENT_S
            }
        if len(asked) < 2:
            return None
        largest = max(asked, key=lambda sender: asked[sender])
        return largest if asked[largest] > _DOMINANT_SHARE * sum(asked.values()) else None


def _decay(seconds: float) -> float:
    """The share that still counts of what was asked for so long ago."""
    return float(0.5 ** (seconds / _PRESENT_S))

"""The estimate of how far ahead work is planned, so that a device never waits for the loop."""

from __future__ import annotations

import math

__all__ = ["Pace"]


class Pace:
    """Estimates, from the last steps, how many of them must be queued behind the one that runs.

    A step's result takes the loop a while to learn of and to answer with the next step: hardly
    anything on an idle machine, several steps' time where another thread holds the interpreter's
    lock. To plan ahead is not free: what arrives meanwhile comes behind what is queued, and a
    sequence that stops is computed on.
    """

    SLACK = 1 / 16
    """Of a step's time: a shorter turn than this is not worth planning ahead."""
    MOST_AHEAD = 12

    def __init__(self) -> None:
        self._step_s = 0.0
        self._turn_s = 0.0

    def note_step(self, seconds: float) -> None:
        """Note how long a step took."""
        self._step_s += (seconds - self._step_s) * (0.25 if self._step_s else 1)

    def note_turn(self, seconds: float) -> None:
        """Note how long after a step's end the next one was queued."""
        # A longer one is believed at once: the device waits for it.
        self._turn_s += (seconds - self._turn_s) * (0.5 if seconds > self._turn_s else 0.1)

    @property
    def ahead(self) -> int:
        """Steps to be queued behind the one that runs."""
        if self._turn_s <= self._step_s * self.SLACK:
            return 0
        return min(self.MOST_AHEAD, math.ceil(1.5 * self._turn_s / max(self._step_s, 1e-6)))

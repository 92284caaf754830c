"""How many requests a server gets at once, and when one that failed is tried again. No clock and no sockets here."""

from __future__ import annotations

import random
from dataclasses import dataclass

START = 4  # requests at once to begin with
SLOWER = 4.0  # times the best pace (seconds a token) at which a server gets no more requests at once
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
LONGEST_ASKED_REST_S = 120.0  # of a Retry-After


@dataclass(frozen=True)
class Pass:
    """Leave to send one request."""

    started: float
    full: bool  # it took the last place
    trial: bool  # the server had failed: this request finds out whether it is back


class Gate:
    """Additive increase, multiplicative decrease, as TCP does it: the limit doubles every round until the first
    refusal, then grows by one a round; 429 and time-outs halve it, once per incident.

    Args:
        most: the limit's own limit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = float(min(START, most))
        self.in_flight = 0
        self.fails = 0  # incidents since the last answer
        self.rest_until = 0.0
        self._failed_at = float("-inf")
        self._trying = False
        self._doubles = True
        self._pace: float | None = None  # seconds a token, smoothed
        self._best = float("inf")

    def is_free(self, now: float) -> bool:
        """Whether a request may be sent. After a failure one goes first, alone."""
        if now < self.rest_until:
            return False
        return not self._trying if self.fails else self.in_flight < int(self.limit)

    def enter(self, now: float) -> Pass:
        self.in_flight += 1
        trial = self.fails > 0
        self._trying = self._trying or trial
        return Pass(now, self.in_flight >= int(self.limit), trial)

    def leave(self, leave: Pass) -> None:
        """A request ended with neither an answer nor a failure (its caller went away)."""
        self.in_flight -= 1
        if leave.trial:
            self._trying = False

    def answered(self, leave: Pass, now: float, tokens: int) -> None:
        """A request was answered with `tokens` tokens; 0 where it was refused for a fault of its own."""
        self.leave(leave)
        self.fails = 0
        if tokens < 1:
            return
        pace = (now - leave.started) / tokens
        self._pace = pace if self._pace is None else 0.8 * self._pace + 0.2 * pace
        self._best = min(self._best, self._pace)
        if leave.full and self._pace <= SLOWER * self._best:
            self.limit = min(self.most, self.limit + (1 if self._doubles else 1 / self.limit))

    def failed(self, leave: Pass, now: float, crowded: bool, retry_after_s: float | None = None) -> None:
        """A request got no answer. Those that were under way at the last failure belong to the same incident.

        Args:
            crowded: the server had too much to do (429, time-out).
            retry_after_s: seconds the server asked to be left alone.
        """
        self.leave(leave)
        if leave.started < self._failed_at:
            return
        self._failed_at = now
        self.fails += 1
        self._doubles = False
        if crowded:
            self.limit = max(1.0, self.limit / 2)
        rest = rest_s(self.fails)
        if retry_after_s is not None:
            rest = max(rest, min(retry_after_s, LONGEST_ASKED_REST_S))
        self.rest_until = now + rest


def rest_s(fails: int) -> float:
    """Seconds to wait after the n-th failure in a row: doubling, with jitter so that clients do not return as one."""
    return min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(fails - 1, 16)) * random.uniform(0.5, 1.5)

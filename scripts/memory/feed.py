"""Where a replay's requests come from, and when: a list of them with times, or users who talk."""

from collections import deque

import numpy as np

from jpaged.lengths import Lengths


class TimedFeed:
    """Requests that arrive at given times, whatever becomes of those before them.

    Args:
      arrival_s: f64[n], ascending.
    """

    def __init__(self, arrival_s: np.ndarray) -> None:
        self._arrival_s = arrival_s
        self._next = 0

    @property
    def next_s(self) -> float | None:
        """When the next request is there; `None`: there is none."""
        return float(self._arrival_s[self._next]) if self._next < len(self._arrival_s) else None

    def take(self) -> int:
        """The next request's index."""
        self._next += 1
        return self._next - 1

    def ended(self, index: int, clock_s: float) -> None:
        """A request was answered."""


class ChatFeed:
    """A number of users: each says the next thing as soon as the answer is there, then begins the next conversation.

    Args:
      conversation_ids: of the requests: equal and adjacent for the turns of a conversation.
      num_users: conversations that go on at once.
    """

    def __init__(self, conversation_ids: np.ndarray, num_users: int) -> None:
        borders = np.flatnonzero(np.diff(conversation_ids)) + 1
        self._ends = set((np.append(borders, len(conversation_ids)) - 1).tolist())
        self._conversations = deque([0, *borders.tolist()])
        self._ready: deque[tuple[float, int]] = deque()
        for _ in range(min(num_users, len(self._conversations))):
            self._ready.append((0.0, self._conversations.popleft()))

    @property
    def next_s(self) -> float | None:
        """When the next request is there; `None`: there is none, or not before another one has ended."""
        return self._ready[0][0] if self._ready else None

    def take(self) -> int:
        """The next request's index."""
        return self._ready.popleft()[1]

    def ended(self, index: int, clock_s: float) -> None:
        """A request was answered: its user goes on."""
        if index not in self._ends:
            self._ready.append((clock_s, index + 1))
        elif self._conversations:
            self._ready.append((clock_s, self._conversations.popleft()))


Feed = TimedFeed | ChatFeed


def all_at_once(lengths: Lengths) -> TimedFeed:
    """A queue that is never empty before the end."""
    return TimedFeed(np.zeros(len(lengths)))


def poisson(lengths: Lengths, rate: float, *, seed: int = 0) -> TimedFeed:
    """Independent arrivals, `rate` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return TimedFeed(np.cumsum(gaps))

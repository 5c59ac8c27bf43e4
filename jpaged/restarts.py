"""`RestartPolicy`: how often something that fails may be started again."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jpaged.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restarts within a window of time; after more than these the failure is final.

    Attributes:
      max_restarts: within the window; 0: never.
      window_s: length of the window.

    Raises:
      ConfigError: a value is out of range.
    """

    max_restarts: int = 3
    window_s: float = 300.0

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts!r}, expected an integer of at least 0")
        if not isinstance(self.window_s, int | float) or not 0 < self.window_s < float("inf"):
            raise ConfigError(f"window_s is {self.window_s!r}, expected a positive number of seconds")


class RestartBudget:
    """Counts restarts against a policy.

    Args:
      policy: how many.
      clock: seconds; for tests.

    Example:
      >>> now = [0.0]
      >>> budget = RestartBudget(RestartPolicy(max_restarts=2, window_s=10), clock=lambda: now[0])
      >>> budget.take(), budget.take(), budget.take()
      (True, True, False)
      >>> now[0] = 10.0  # the first two are out of the window
      >>> budget.take()
      True
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Whether one more restart is allowed now; it counts then."""
        now = self._clock()
        while self._taken and now - self._taken[0] >= self._policy.window_s:
            self._taken.popleft()
        if len(self._taken) >= self._policy.max_restarts:
            return False
        self._taken.append(now)
        return True

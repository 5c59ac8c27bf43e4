"""`Admission`: who is let in, how many at once, and what happens when the server is about to end."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jpaged.server.api_error import ApiError
from jpaged.server.keys import Tenant


class Admission:
    """Counts what is being served. Used by one event loop.

    Args:
      max_requests: sequences at once, of all clients.
      max_requests_per_key: of one; `None`: no limit of its own.

    Attributes:
      is_draining: nothing new is let in.
      num_sequences: that are being served or wait.
      rejections: refusals by reason, since the start.
    """

    def __init__(self, *, max_requests: int, max_requests_per_key: int | None) -> None:
        self._max_requests = max_requests
        self._max_per_key = max_requests_per_key
        self.is_draining = False
        self.num_sequences = 0
        self.rejections: Counter[str] = Counter()
        self._of: Counter[str] = Counter()
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def place(self, tenant: Tenant) -> Iterator["Place"]:
        """A place for one request while the block runs; the block says how many sequences it needs, and may leave it
        before it sends the end of an answer.

        Raises:
          ApiError: 429 or 503, with the time to come again.
        """
        if self.is_draining:
            raise self._refused("draining", 503, "the server is about to end; send the request to another one", 5)
        place = Place(self, tenant)
        self._num_open += 1
        self._empty.clear()
        try:
            place.widen(1)
            yield place
        finally:
            place.leave()
            self._num_open -= 1
            if not self._num_open:
                self._empty.set()

    def check(self, count: int) -> None:
        """Refuses a request of so many sequences if it is too large whatever else is served: to try again is of no use.

        Raises:
          ApiError: 400.
        """
        limits = [limit for limit in (self._max_per_key, self._max_requests) if limit is not None]
        if count > min(limits):
            raise ApiError(400, f"the request asks for {count} answers at once, expected at most {min(limits)}")

    def take(self, tenant: Tenant, count: int) -> None:
        """Counts `count` more sequences.

        Raises:
          ApiError: they are too many.
        """
        own = self._of[tenant.name] + count
        if self._max_per_key is not None and own > self._max_per_key:
            limit = self._max_per_key
            raise self._refused(
                "key_limit", 429, f"this key has too many requests at once, expected at most {limit}", 1
            )
        if self.num_sequences + count > self._max_requests:
            limit = self._max_requests
            raise self._refused(
                "queue_full", 503, f"the server has too many requests, expected at most {limit} at once", 1
            )
        self._of[tenant.name] = own
        self.num_sequences += count

    def give_back(self, tenant: Tenant, count: int) -> None:
        """They have ended."""
        self.num_sequences -= count
        self._of[tenant.name] -= count
        if not self._of[tenant.name]:
            del self._of[tenant.name]

    async def wait_empty(self) -> None:
        """Returns when nothing is being served, and the ends of all answers are handed over."""
        await self._empty.wait()

    def _refused(self, reason: str, status: int, message: str, retry_after_s: int) -> ApiError:
        self.rejections[reason] += 1
        return ApiError(status, message, retry_after_s=retry_after_s)


class Place:
    """The place of one request; see `Admission.place`."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission, self._tenant, self._count = admission, tenant, 0

    def widen(self, count: int) -> None:
        """To `count` sequences in all.

        Raises:
          ApiError: they are too many.
        """
        self._admission.check(count)
        self._admission.take(self._tenant, count - self._count)
        self._count = count

    def leave(self) -> None:
        """It has ended."""
        if self._count:
            self._admission.give_back(self._tenant, self._count)
            self._count = 0

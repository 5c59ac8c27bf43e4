"""`LiveRequests`: which requests are being served, for whom, and by which names the engine knows them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jpaged.server.keys import Tenant


class LiveRequests:
    """Used by one event loop."""

    def __init__(self) -> None:
        self._of_engine: dict[str, tuple[str, Tenant]] = {}

    @contextmanager
    def named(self, answer_id: str, count: int, tenant: Tenant) -> Iterator[list[str]]:
        """Names for the engine, one a prompt, while the block runs or until they are forgotten; unlike all others,
        whatever clients choose.

        Args:
          answer_id: as the client knows the request.
          count: prompts.
          tenant: whose it is.
        """
        names = []
        for number in range(count):
            base = answer_id if count == 1 else f"{answer_id}-{number}"
            name, again = base, 0
            while name in self._of_engine:
                again += 1
                name = f"{base}~{again}"
            self._of_engine[name] = answer_id, tenant
            names.append(name)
        try:
            yield names
        finally:
            self.forget(names)

    def forget(self, names: list[str]) -> None:
        """They name nothing any more; the list is empty after it."""
        for name in names:
            del self._of_engine[name]
        names.clear()

    def of_answers(self, answer_ids: Iterable[str]) -> list[str]:
        """The engine's names of requests that clients know by these ids."""
        wanted = set(answer_ids)
        return [name for name, (answer_id, _) in self._of_engine.items() if answer_id in wanted]

    def tenant_of(self, name: str) -> Tenant | None:
        """Whose a request is that the engine knows by this name."""
        found = self._of_engine.get(name)
        return None if found is None else found[1]

"""`BuddyAllocator`: runs of slots whose sizes are powers of two, as systems before paging gave them to sequences."""

from bisect import insort


class BuddyAllocator:
    """Hands out aligned runs; a run is halved until it is as small as it may be, and buddies are joined again.

    A pool whose size is no power of two begins as the powers of two that it is made of, the largest first.

    Args:
      num_slots: of the pool.

    Example:
      >>> pool = BuddyAllocator(24)
      >>> pool.allocate(5), pool.allocate(3), pool.num_free
      (16, 0, 12)
      >>> pool.allocate(9) is None
      True
      >>> pool.free(16)
      >>> pool.num_free
      20

    Reference:
      Knuth, The Art of Computer Programming, volume 1, section 2.5 C.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"the pool has {num_slots} slots, expected at least 1")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: dict[int, list[int]] = {}  # starts of free runs by size, ascending
        self._sizes: dict[int, int] = {}  # of runs in use, by start
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._free[1 << bit] = [start]
                start += 1 << bit

    def allocate(self, num_slots: int) -> int | None:
        """The start of a run of at least `num_slots` slots, out of the smallest free run that holds them, or `None`."""
        if num_slots < 1:
            raise ValueError(f"{num_slots} slots were asked for, expected at least 1")
        wanted = 1 << (num_slots - 1).bit_length()
        fitting = [size for size, starts in self._free.items() if size >= wanted and starts]
        if not fitting:
            return None
        size = min(fitting)
        start = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            insort(self._free.setdefault(size, []), start + size)
        self._sizes[start] = size
        self.num_free -= size
        return start

    def size_of(self, start: int) -> int:
        """Slots of the run in use that begins at `start`."""
        return self._sizes[start]

    def free(self, start: int) -> None:
        """Takes a run back, and joins it with its buddy as long as that is free and whole."""
        if start not in self._sizes:
            raise ValueError(f"no run in use begins at slot {start}")
        size = self._sizes.pop(start)
        self.num_free += size
        while start ^ size in (buddies := self._free.get(size, [])):
            buddies.remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        insort(self._free.setdefault(size, []), start)

"""`GroupQueues`: where each group is, and how it gets from there to elsewhere.

    add ──► waiting ──────── run ───────► running ──► closed
                                ▲            │
             preempted ── run ──┘◄─ preempt ─┘

Running groups hold pages, and one state index for each sequence that they have or may yet get by a fork.
"""

import heapq
from collections.abc import Iterable

from jpaged.config import SchedulerConfig
from jpaged.errors import PageStateError
from jpaged.memory_manager import MemoryManager
from jpaged.preemption import PreemptionCosts
from jpaged.ranked_groups import RankedGroups
from jpaged.running_table import RunningRows, RunningTable
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus

WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED
_HEADROOM_PARTS = 12  # of the pool; headroom is one of them at the most
_MAX_TRIED = 8  # waiting groups that are tried behind one that does not fit


class GroupQueues:
    """All unfinished groups.

    Args:
      config: policies, and the number of state indices (`max_num_seqs`).
      memory: where pages come from.
      chunk: tokens of a sequence in one step at the most.
      costs: as in `Scheduler`.

    Attributes:
      table: the counters of those that run.
    """

    def __init__(
        self, config: SchedulerConfig, memory: MemoryManager, *, chunk: int, costs: PreemptionCosts | None = None
    ) -> None:
        self._config = config
        self._memory = memory
        self._chunk = chunk
        self._costs = costs
        self.groups: dict[str, SequenceGroup] = {}  # by request id
        self.waiting, self.preempted, self.running = RankedGroups(), RankedGroups(), RankedGroups()
        self.table = RunningTable(config.max_num_seqs)
        self._running_rows: RunningRows | None = None  # to be made anew
        self._free_state_indices = list(range(config.max_num_seqs))  # a heap
        self.num_preemptions = 0
        self.num_swaps = 0

    @property
    def running_rows(self) -> RunningRows:
        """The unfinished sequences of running groups, in the order of service."""
        if self._running_rows is None:
            seqs = [seq for group in self.running for seq in group.seqs if seq.status is RUNNING]
            self._running_rows = RunningRows(seqs)
        return self._running_rows

    @property
    def num_free_rows(self) -> int:
        """Sequences that may run beside those that do, or may yet by a fork."""
        return len(self._free_state_indices)

    def add(self, group: SequenceGroup) -> None:
        """A new group; its `rank` is set."""
        self.groups[group.request.request_id] = group
        self.waiting.add(group)

    # ------------------------------------------------------------------------------------------ to run

    def next_to_run(self, unfinished: Iterable[Sequence] = ()) -> SequenceGroup | None:
        """The next group that can run now: its state indices and pages are free, and all its tokens are known.

        Args:
          unfinished: sequences that run and have more tokens than were computed: pages for these are not given away.
        """
        if not self._free_state_indices or not (len(self.preempted) or len(self.waiting)):
            return None
        due = sum(map(self.num_pages_due, unfinished))
        recomputed = (seq for group in self.running if group.num_recomputed for seq in group.live)
        due += sum(map(self._num_pages_to_keep, recomputed))
        if len(self.preempted):
            group = self.preempted[0]
            # A pending token is not known to the host yet, and the device's copy of it was given up. Who lacks no token
            # waits for the results of its last step, which may end it.
            lacks = any(seq.num_tokens > seq.num_computed_tokens for seq in group.live)
            ready = lacks and not group.num_pending and not group.awaits_mask
            return group if ready and self._fits(group, due) else None
        first = None
        # A group whose grammar is still being compiled takes nobody's turn.
        for tried, group in enumerate(group for group in self.waiting if not group.awaits_mask):
            first = first or group
            if tried and (tried > _MAX_TRIED or first.num_passed >= self._config.max_passes):
                return None
            if self._fits(group, due):
                first.num_passed += tried > 0
                return group
        return None

    def run(self, group: SequenceGroup) -> None:
        """Gives a waiting or preempted group its state indices, and its pages if they are on the host."""
        self._queue_of(group).remove(group)
        self.running.add(group)
        self._running_rows = None
        indices = [heapq.heappop(self._free_state_indices) for _ in range(self._num_state_indices(group))]
        group.state_indices = indices[::-1]
        group.status = RUNNING
        for seq in group.live:
            seq.status = RUNNING
            self.table.begin(seq, group.state_indices.pop())
        if any(seq.host_pages for seq in group.live):
            self._memory.swap_in(group.live)

    def num_pages_due(self, seq: Sequence) -> int:
        """Pages that a sequence that runs will get for the tokens it has."""
        held = len(seq.pages) - (0 if self._memory.sliding_window is None else seq.pages.count(0))
        return max(self._memory.pages_at_most(seq.num_tokens, self._chunk) - held, 0)

    def num_pages_to_give(self, unfinished: Iterable[Sequence]) -> int:
        """Pages that those who wait may have at the least: beside those due to `unfinished`, which run, and beside all
        headroom that may be asked for. Negative if these are more than there are."""
        headroom = self._config.headroom_pages * self._config.max_num_seqs
        kept = sum(map(self.num_pages_due, unfinished)) + min(headroom, self._memory.capacity // _HEADROOM_PARTS)
        return self._memory.allocator.num_available - kept

    def _num_pages_to_keep(self, seq: Sequence) -> int:
        """What a sequence is expected to grow by: half of what it has said, or half of the way to its limit if less.

        So much is kept for each sequence that was recomputed, lest it is again.
        """
        growth = max(min(seq.num_output_tokens, seq.group.limit - seq.num_tokens), 0) // 2
        now, then = (self._memory.pages_at_most(n, self._chunk) for n in (seq.num_tokens, seq.num_tokens + growth))
        return then - now

    def _fits(self, group: SequenceGroup, due: int) -> bool:
        memory, live = self._memory, group.live
        available, alone = memory.allocator.num_available, not len(self.running)
        if self._num_state_indices(group) > len(self._free_state_indices):
            return False
        # Without room to grow for those that run, the newcomer would be preempted a few steps later.
        headroom = self._config.headroom_pages * self.table.num_running
        available -= due + min(headroom, memory.capacity // _HEADROOM_PARTS)
        if group.num_pages_lacking > available and not alone:
            return False  # what it needs has hardly changed since it was looked up
        shared = 0 if memory.sliding_window is not None else live[0].num_prompt_tokens // memory.allocator.page_size
        if any(seq.host_pages for seq in live):
            needed = memory.num_host_pages(live)
            needed += 0 if alone else len(live)  # shared pages may have to be copied
            for seq in live:
                there = len(seq.host_pages) - seq.host_pages.count(0) or (shared if seq is not live[0] else 0)
                needed += max(memory.pages_at_most(seq.num_tokens, self._chunk) - there, 0)
        else:
            needed = memory.num_pages_taken(memory.find(live[0]), live[0].num_tokens, self._chunk)
            for seq in live[1:]:
                needed += memory.pages_at_most(seq.num_tokens, self._chunk) - shared
        if group.num_recomputed and not alone:
            needed += sum(map(self._num_pages_to_keep, live))
        fits = needed <= available
        group.num_pages_lacking = 0 if fits else needed
        return fits

    @staticmethod
    def _num_state_indices(group: SequenceGroup) -> int:
        forks_later = group.beam is not None or len(group.seqs) == 1
        return group.request.params.num_sequences if forks_later else len(group.live)

    def _queue_of(self, group: SequenceGroup) -> RankedGroups:
        if group.status is RUNNING:
            return self.running
        return self.preempted if group.num_preemptions else self.waiting

    # ------------------------------------------------------------------------------------------ running

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence of the same group, with the same tokens, on the same pages."""
        group = parent.group
        child = Sequence(group, index, tokens=parent.tokens, stop_ids=parent.stop_ids)
        child.limit, child.watch = parent.limit, parent.watch
        child.num_cached_tokens, child.status = parent.num_cached_tokens, parent.status
        if group.status is RUNNING:
            self.table.begin(child, group.state_indices.pop())
        self._memory.fork(parent, child)
        self._running_rows = None
        return child

    def victim_for(self, group: SequenceGroup) -> SequenceGroup | None:
        """Who is preempted when `group` lacks a page: the last group after it; itself, if it is the last.

        `None`: it had better wait. Nobody is made to compute tokens a third time while others can still go on, and so
        give pages back.
        """
        last = None
        for last in self.running.after(group):
            if not last.num_recomputed:
                return last
        may_go = last is None and (not group.num_recomputed or len(self.running) == 1)
        return group if may_go else None

    def victim_of_all(self) -> SequenceGroup:
        """Who is preempted when none of several groups can go on: as `victim_for` the first of them, but somebody."""
        return self.victim_for(self.running[0]) or self.running[-1]

    def preempt(self, group: SequenceGroup) -> None:
        """Takes all pages and state indices of a running group; it will come back before anybody new."""
        live = group.live
        if self._wants_swap(group, live):
            self._memory.swap_out(live)
            self.num_swaps += 1
        else:
            group.num_recomputed += 1
            for seq in live:
                self._memory.release(seq)
        for seq in live:
            seq.status = WAITING
            group.state_indices.append(self.table.end(seq))
        self._free(group.state_indices)
        group.state_indices = []
        self.running.remove(group)
        self._running_rows = None
        group.status = WAITING
        group.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.add(group)

    def _wants_swap(self, group: SequenceGroup, live: list[Sequence]) -> bool:
        how = self._config.preemption
        if how == "recompute" or not self._memory.can_swap_out(live):
            return False
        if how == "swap" or group.num_recomputed:  # while the host has room, nothing is computed more than twice
            return True
        if self._costs is None:
            return False
        num_pages = len({page for seq in live for page in seq.pages if page})
        prompt = live[0].num_prompt_tokens
        num_tokens = live[0].num_computed_tokens + sum(max(seq.num_computed_tokens - prompt, 0) for seq in live[1:])
        return self._costs.prefers_swap(num_tokens=num_tokens, num_pages=num_pages)

    # ------------------------------------------------------------------------------------------ the end

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence and takes back what it holds, here or on the host; its group ends with the last one."""
        group = seq.group
        if seq.status is RUNNING:
            self._memory.release(seq)
            index = self.table.end(seq)
            if group.beam is not None:  # another beam may take its place
                group.state_indices.append(index)
            else:
                self._free([index])
            self._running_rows = self._running_rows and self._running_rows.without(seq)
        else:
            self._memory.drop_host_pages(seq)
        seq.status = FINISHED
        seq.drop_pending()
        if all(other.status is FINISHED for other in group.seqs):
            self._queue_of(group).remove(group)
            self._free(group.state_indices)
            group.state_indices = []
            group.status = FINISHED
            self._memory.pins.drop_promise(group.request.request_id)
            del self.groups[group.request.request_id]

    def _free(self, state_indices: list[int]) -> None:
        for index in state_indices:
            heapq.heappush(self._free_state_indices, index)

    def check_invariants(self) -> None:
        """Checks, between two plans, that pages, state indices and counters are held exactly by those who need them.

        Raises:
          PageStateError: they are not.
        """
        running = [seq for group in self.running for seq in group.seqs if seq.status is RUNNING]
        rows = self.running_rows
        # A beam search may have changed the order of its beams since.
        same = {*rows.seqs} == {*running} and [seq.group for seq in rows.seqs] == [seq.group for seq in running]
        if not same or rows.entries.tolist() != [seq.state_index for seq in rows.seqs]:
            raise PageStateError(f"the rows that run are kept as {rows.seqs}, expected {running}")
        self.table.check_invariants(running)
        self._memory.check_invariants(running, [seq for group in self.preempted for seq in group.seqs])
        for seq in running:
            needed = self._memory.allocator.pages_for(seq.num_computed_tokens)
            if seq.group.status is not RUNNING or len(seq.pages) != needed or seq.host_pages:
                name = seq.request.request_id
                raise PageStateError(f"{name!r} is {seq.status.value} with {len(seq.pages)} pages, needs {needed}")
        for seq in (seq for group in (*self.waiting, *self.preempted) for seq in group.seqs):
            if seq.pages or seq.state_index is not None or (seq.num_computed_tokens and not seq.host_pages):
                raise PageStateError(f"{seq.request.request_id!r} waits with pages, computed tokens or a state index")
        indices = rows.entries.tolist() + self._free_state_indices
        indices += [index for group in self.running for index in group.state_indices]
        if sorted(indices) != list(range(self._config.max_num_seqs)):
            raise PageStateError(f"state indices in use and free are {indices}, expected each one once")

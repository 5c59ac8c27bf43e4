"""A fake device for the scheduler's tests, and what every request must answer whatever else happens."""

from collections import deque

from jpaged.config import SchedulerConfig
from jpaged.page_allocator import PageAllocator
from jpaged.request import Request, SamplingParams, Sequence
from jpaged.scheduler import Scheduler
from jpaged.step_plan import SequenceUpdate, StepPlan

VOCAB = 12
EOS = 0


def make_seq(request_id: str, prompt_len: int, *, seed: int = 0, **params) -> Sequence:
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
    prompt = tuple((seed + i) % VOCAB for i in range(prompt_len))
    return Sequence(Request(request_id=request_id, prompt_token_ids=prompt, params=params, seed=seed))


def make_scheduler(
    num_pages: int = 17, page_size: int = 4, max_num_seqs: int = 4, budget: int = 16, max_model_len: int = 32
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, PageAllocator(num_pages, page_size), max_model_len=max_model_len, eos_token_ids=[EOS])


def sampled_token(seq: Sequence, position: int) -> int:
    """What the model samples for this position: of the request alone. Requests of seed % 5 == 4 fail at position 13."""
    seed = seq.request.seed
    if seed % 5 == 4 and position == 13:
        return -1
    return (seed * 31 + position * position * 7 + position) % VOCAB


def undisturbed(seq: Sequence, limit: int) -> tuple[list[int], str, int | None]:
    """Output tokens, finish reason and stop reason of a request that is alone in the world."""
    params, output = seq.request.params, []
    most = limit - seq.num_prompt_tokens if params.max_tokens is None else params.max_tokens
    while len(output) < most:
        token = sampled_token(seq, seq.num_prompt_tokens + len(output))
        if token < 0:
            return output, "error", None
        output.append(token)
        if len(output) > params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return output, "stop", None
            if token in params.stop_token_ids:
                return output, "stop", token
    return output, "length", None


class FakeDevice:
    """Runs steps in order, the moment they are dispatched; its results are read whenever the test likes.

    A slot of the pool remembers which token of which sequence was written there last, so that a step can tell whether
    the pages of a row really hold the row's past.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool: dict[tuple[int, int], tuple[Sequence, int, int]] = {}
        self.last_token: dict[int, int] = {}

    def run(self, plan: StepPlan) -> list[int]:
        written = set()
        for row in plan.rows:
            for position in range(row.start, row.kv_len):
                page, offset = divmod(position, self.page_size)
                slot = (row.seq.pages[page], offset)
                assert slot not in written, "two rows of one step write to one slot"
                written.add(slot)
                self.pool[slot] = (row.seq, position, self.token_at(row.seq, position))
        return [self.sample(row.seq, row.kv_len) if row.samples else 99 for row in plan.rows]

    def token_at(self, seq: Sequence, position: int) -> int:
        if position < len(seq.tokens):
            return seq.tokens[position]
        assert seq.state_index is not None
        return self.last_token[seq.state_index]

    def sample(self, seq: Sequence, kv_len: int) -> int:
        for position in range(kv_len):
            page, offset = divmod(position, self.page_size)
            prompt = seq.request.prompt_token_ids
            token = prompt[position] if position < len(prompt) else sampled_token(seq, position)
            assert self.pool[seq.pages[page], offset] == (seq, position, token), f"the KV of token {position} is wrong"
        assert seq.state_index is not None
        self.last_token[seq.state_index] = sampled_token(seq, kv_len)
        return self.last_token[seq.state_index]


class Driver:
    """Scheduler and fake device together, as an engine would drive them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler._allocator.page_size)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()

    def dispatch(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def collect(self) -> list[SequenceUpdate]:
        return self.scheduler.update(*self.in_flight.popleft())

    def step(self, depth: int = 0) -> StepPlan | None:
        plan = self.dispatch()
        while len(self.in_flight) > (depth if plan is not None else 0):
            self.collect()
        self.scheduler.check_invariants()
        return plan

    def drain(self, depth: int = 0, most: int = 2_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step(depth)
        while self.in_flight:
            self.collect()
        assert not self.scheduler.has_work, "some sequence never ends"

"""A fake device for the scheduler's tests, and what every request must answer whatever else happens.

The fake model can be computed by hand: what it samples depends on the tokens, positions and weight versions that it
really finds in the pages of a row, read through the row's page list, on their number, and on the seed of the sequence.
So a wrong page shows as a wrong token.
"""

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jpaged.beam_search import BeamSearch, Hypothesis
from jpaged.config import SchedulerConfig
from jpaged.memory_manager import MemoryManager
from jpaged.preemption import PreemptionCosts
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.speculation import may_guess
from jpaged.step_plan import PlannedRow, StepPlan

VOCAB = 12
EOS = 0
NOT_SAMPLED = 99


def make_group(request_id: str, prompt: int | AbstractSequence[int], *, seed: int = 0, **options) -> SequenceGroup:
    """A request for that prompt, or one of so many tokens; options are those of `Request`, then of `SamplingParams`."""
    tokens = tuple((seed + i) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    names = ("priority", "cache_salt", "pin", "arrival_time_s")
    request = {name: options.pop(name) for name in names if name in options}
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **options})
    return SequenceGroup(
        Request(request_id=request_id, prompt_token_ids=tokens, params=params, seed=seed, **request),
    )


def make_scheduler(
    num_pages: int = 17,
    page_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 32,
    *,
    prefix_cache: bool = True,
    host_pages: int = 0,
    sliding_window: int | None = None,
    guesses: int = 0,
    token_buckets: AbstractSequence[int] = (),
    costs: PreemptionCosts | None = None,
    **config,
) -> Scheduler:
    memory = MemoryManager.for_pool(
        num_pages, page_size, prefix_cache=prefix_cache, num_host_pages=host_pages, sliding_window=sliding_window
    )
    config = {"headroom_pages": 0, **config}  # else hardly anybody is admitted to such small pools
    settings = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config)
    speculation: Any = Oracle(guesses, sliding_window) if guesses else None
    options: Any = {"token_buckets": token_buckets, "speculation": speculation, "costs": costs}
    return Scheduler(settings, memory, max_model_len=max_model_len, eos_token_ids=[EOS], **options)


class Oracle:
    """In the place of `Speculation`: knows what comes next, and spoils some of it.

    Args:
      most: guesses of a row in a step.
      window: of the model.
    """

    max_rows = 6

    def __init__(self, most: int, window: int | None) -> None:
        self._most = most
        self._window = window

    def rests(self) -> bool:
        return False

    def follow(self, seqs: AbstractSequence[Sequence]) -> list[int]:
        places = [place for place, seq in enumerate(seqs) if seq.limit and may_guess(seq)]
        for place in places:
            if seqs[place].guesser is None:
                seqs[place].guesser = OracleGuesser(seqs[place], self._window)  # type: ignore[assignment]
        return places

    def counts(self, seqs: list[Sequence], able: list[int], *, ahead: bool = False) -> list[int]:
        """Between none and `most` each, and no token beyond the last one that it may have."""
        counts = [0] * len(seqs)
        for place in able:
            seq = seqs[place]
            wanted = (3 * len(seq.tokens) + seq.index + len(seqs)) % (self._most + 2)
            counts[place] = max(min(wanted, self._most, seq.limit - len(seq.tokens) - 1), 0)
        return counts if any(counts) else []

    wait = settle = begin = lambda *_, **__: None  # it keeps no account


class OracleGuesser:
    """What a sequence answers, with every fifth token changed."""

    def __init__(self, seq: Sequence, window: int | None) -> None:
        answer = undisturbed(seq.request, seq.index, seq.group.limit, window).output
        self._tokens = [*seq.request.prompt_token_ids, *answer]

    def guess(self, tokens: AbstractSequence[int], count: int) -> list[int]:
        following = (self._tokens[len(tokens) :] + [1] * count)[:count]
        return [(t + ((len(tokens) + i) % 5 == 0)) % VOCAB for i, t in enumerate(following)]


# ------------------------------------------------------------------------------------------------ the model


class KV(NamedTuple):
    """What a slot of a page holds."""

    token: int
    position: int
    version: int  # of the weights that computed it


def digest(seen: Iterable[KV | None], kv_len: int, seed: int) -> int:
    """All that the model knows when it samples: what its row sees, in order, and how much; `None` was never written."""
    value = kv_len + 31 * seed
    for kv in seen:
        token, position, version = kv or (VOCAB, -1, -1)
        value = (value * 131 + token * 17 + position * 3 + version * 7 + 1) % 1_000_003
    return value


def fails(kv_len: int, seed: int) -> bool:
    """NaN: sequences of seed % 5 == 4 fail after 13 tokens."""
    return seed % 5 == 4 and kv_len == 13


def likeliest(value: int, count: int) -> list[tuple[int, float]]:
    """The model's likeliest tokens, best first, with log-probabilities."""
    ranked = [(token, -((value + 29 * token * token + 5 * token) % 97 + 1) / 16) for token in range(VOCAB)]
    return sorted(ranked, key=lambda pair: (-pair[1], pair[0]))[:count]


def window_of(tokens: AbstractSequence[int], window: int | None, version: int) -> list[KV]:
    """What a sequence of these tokens sees if nothing goes wrong."""
    first = 0 if window is None else max(len(tokens) - window, 0)
    return [KV(tokens[i], i, version) for i in range(first, len(tokens))]


class Answer(NamedTuple):
    """Of one sequence."""

    output: list[int]
    finish_reason: str
    stop_reason: int | None


def undisturbed(request: Request, index: int, limit: int, window: int | None = None, version: int = 0) -> Answer:
    """What a sequence answers that is alone in the world; `limit` holds for prompt and output together."""
    params, tokens, seed = request.params, list(request.prompt_token_ids), request.seed + index
    num_prompt = len(tokens)
    most = limit - num_prompt if params.max_tokens is None else params.max_tokens
    while (made := len(tokens) - num_prompt) < most:
        if fails(len(tokens), seed):
            return Answer(tokens[num_prompt:], "error", None)
        token = digest(window_of(tokens, window, version), len(tokens), seed) % VOCAB
        tokens.append(token)
        if made >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return Answer(tokens[num_prompt:], "stop", None)
            if token in params.stop_token_ids:
                return Answer(tokens[num_prompt:], "stop", token)
    return Answer(tokens[num_prompt:], "length", None)


def undisturbed_beams(
    request: Request, limit: int, window: int | None = None, version: int = 0
) -> list[Hypothesis] | None:
    """What a beam search finds that is alone in the world; `None` if it fails."""
    params, prompt = request.params, list(request.prompt_token_ids)
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    search = BeamSearch(
        width=params.num_sequences,
        num_return=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        stop_token_ids=stops,
        max_tokens=limit - len(prompt) if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
    )
    beams = [prompt]
    while not search.finished:
        if fails(len(beams[0]), request.seed):
            return None
        values = [digest(window_of(beam, window, version), len(beam), request.seed) for beam in beams]
        moves = search.advance([likeliest(value, search.num_candidates) for value in values])
        beams = [[*beams[parent], token] for parent, token in moves]
    return search.results()


# ------------------------------------------------------------------------------------------------ the device


@dataclass(frozen=True)
class Results:
    """Of a step: what crosses to the host."""

    tokens: list[int]  # of all rows, then of all guesses
    values: list[int]  # what each row's distribution was made of

    def candidates(self, row: int) -> list[tuple[int, float]]:
        return likeliest(self.values[row], VOCAB)


@dataclass
class FakeDevice:
    """Runs steps in order, the moment they are dispatched; its results are read whenever the test likes."""

    page_size: int
    window: int | None = None
    version: int = 0
    pool: dict[tuple[int, int], KV] = field(default_factory=dict)  # by page and slot
    host: dict[int, list[KV | None]] = field(default_factory=dict)  # by page
    last_token: dict[int, int] = field(default_factory=dict)  # by state index
    num_computed: int = 0

    def run(self, plan: StepPlan) -> Results:
        self.move(plan)
        rows, written = list(plan.rows), set()
        guesses = guesses_of(plan)
        for row, from_device, guessed in zip(rows, plan.from_device.tolist(), guesses, strict=True):
            self.check_last_token(row, from_device, len(guessed))
            for position in range(row.start, row.kv_len):
                slot = self.slot(row.seq, position)
                assert slot[0] != 0, "a token is written to the null page"
                assert slot not in written, "two rows of one step write to one slot"
                written.add(slot)
                later = position - (row.kv_len - len(guessed))
                token = guessed[later] if later >= 0 else self.token_at(row.seq, position)
                self.pool[slot] = KV(token, position, self.version)
        self.num_computed += len(written)
        tokens, values, last = [], [], {}
        for row in rows:
            source = rows[row.source]
            kv_len = source.kv_len - len(guesses[row.source])
            values.append(self.value_of(row, source.seq, kv_len) if row.samples else 0)
            tokens.append(self.sampled(row, values[-1], kv_len) if row.samples else NOT_SAMPLED)
            if row.samples:
                last[row.seq.state_index] = tokens[-1]
        for row, guessed in zip(rows, guesses, strict=True):
            for kv_len in range(row.kv_len - len(guessed) + 1, row.kv_len + 1):
                tokens.append(self.sampled(row, self.value_of(row, row.seq, kv_len), kv_len))
                last[row.seq.state_index] = NOT_SAMPLED  # nobody knows which of them was the last to be written
        self.last_token |= last  # after all rows have read
        return Results(tokens, values)

    @staticmethod
    def sampled(row: PlannedRow, value: int, kv_len: int) -> int:
        return -1 if fails(kv_len, row.seq.seed) else value % VOCAB

    def move(self, plan: StepPlan) -> None:
        """Within each field all pages are read before any is written."""
        swapped_out, swapped_in, copies = plan.transfers
        for pairs in plan.transfers:
            assert len({target for _, target in pairs}) == len(pairs), "two transfers to one page"
            assert all(source and target for source, target in pairs), "a transfer from or to the null page"
        for host_page, contents in [(target, self.read(page)) for page, target in swapped_out]:
            self.host[host_page] = contents
        for page, contents in [(target, self.host[host_page]) for host_page, target in swapped_in]:
            self.write(page, contents)
        for page, contents in [(target, self.read(page)) for page, target in copies]:
            self.write(page, contents)

    def read(self, page: int) -> list[KV | None]:
        return [self.pool.get((page, slot)) for slot in range(self.page_size)]

    def write(self, page: int, contents: list[KV | None]) -> None:
        for slot, kv in enumerate(contents):
            self.pool.pop((page, slot), None)
            if kv is not None:
                self.pool[page, slot] = kv

    def slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        page, slot = divmod(position, self.page_size)
        return seq.pages[page], slot

    def token_at(self, seq: Sequence, position: int) -> int:
        if position < len(seq.tokens):
            return seq.tokens[position]
        assert seq.state_index is not None
        return self.last_token[seq.state_index]

    def check_last_token(self, row: PlannedRow, from_device: bool, num_guesses: int) -> None:
        """A row's last token is what the device sampled last for the sequence, or the host knows it, or guesses it."""
        seq, last = row.seq, row.kv_len - 1 - num_guesses
        assert not (from_device and num_guesses)
        if from_device:
            assert row.num_tokens > 0
            assert seq.state_index is not None
            assert last >= len(seq.tokens) or seq.tokens[last] == self.last_token[seq.state_index]
        else:
            assert last < len(seq.tokens)

    def value_of(self, row: PlannedRow, source: Sequence, kv_len: int) -> int:
        first = 0 if self.window is None else max(kv_len - self.window, 0)
        seen = (self.pool.get(self.slot(source, position)) for position in range(first, kv_len))
        return digest(seen, kv_len, row.seq.seed)


def guesses_of(plan: StepPlan) -> list[list[int]]:
    """Of each row."""
    if plan.drafts is None:
        return [[] for _ in plan.seqs]
    tokens, counts = iter(plan.drafts.tokens.tolist()), plan.drafts.counts.tolist()
    return [[next(tokens) for _ in range(count)] for count in counts]


class Driver:
    """Scheduler and fake device together, as an engine would drive them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory = scheduler._memory
        self.device = FakeDevice(self.memory.allocator.page_size, self.memory.sliding_window)
        self.in_flight: deque[tuple[StepPlan, Results]] = deque()

    def add(self, *groups: SequenceGroup) -> None:
        for group in groups:
            self.scheduler.add(group)

    def dispatch(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            results = self.device.run(plan)
            if plan.seqs:
                self.in_flight.append((plan, results))
        return plan

    def collect(self) -> list[list[int]]:
        plan, results = self.in_flight.popleft()
        tokens = plan.new_tokens(np.array(results.tokens))
        return self.scheduler.update(plan, tokens, results.candidates).tokens

    def pending(self) -> Counter[Sequence]:
        """Tokens that steps in flight may have sampled of each sequence."""
        pending: Counter[Sequence] = Counter()
        for plan, _ in self.in_flight:
            for seq, samples, guesses in zip(plan.seqs, plan.samples, guesses_of(plan), strict=True):
                pending[seq] += int(samples) + len(guesses)
        return pending

    def step(self, depth: int = 0) -> StepPlan | None:
        """One plan; results are read once more than `depth` steps are in flight."""
        plan = self.dispatch()
        self.scheduler.check_invariants()
        while len(self.in_flight) > (depth if plan is not None and plan.seqs else 0):
            self.collect()
            self.scheduler.check_invariants()
        return plan

    def drain(self, depth: int = 0, most: int = 2_000) -> list[StepPlan]:
        """Steps until nothing is left; the plans."""
        plans = []
        while self.scheduler.has_work:
            idle = not self.in_flight
            plan = self.step(depth)
            assert plan is not None or not idle, "there is work, nothing is in flight, and nothing is planned"
            assert len(plans) < most, "some sequence never ends"
            plans += [plan] if plan is not None else []
        while self.in_flight:
            self.collect()
        self.scheduler.check_invariants()
        return plans

    def change_weights(self) -> None:
        self.device.version += 1
        self.scheduler.weights_changed()

    def check_answers(self, group: SequenceGroup, version: int = 0) -> None:
        """A group that has ended by itself must have answered what it would have alone."""
        request, window = group.request, self.memory.sliding_window
        assert group.is_finished
        if group.beam is not None:
            expected = undisturbed_beams(request, group.limit, window, version)
            if expected is None:
                assert all(seq.finish_reason == "error" for seq in group.seqs)
            else:
                assert group.beam.results() == expected
            return
        assert [seq.index for seq in group.seqs] == list(range(len(group.seqs)))
        for seq in group.seqs:
            found = Answer(seq.output_token_ids, str(seq.finish_reason), seq.stop_reason)  # type: ignore[arg-type]
            assert found == undisturbed(request, seq.index, group.limit, window, version)
        assert len(group.seqs) == request.params.num_sequences or request.params.max_tokens == 0

"""Pages that several sequences share: prefixes, answers to one request, pins; and pages that leave a window."""

import pytest

from jpaged.errors import PromptTooLongError, RequestError
from jpaged.sequence import SequenceGroup
from tests.scheduler_driver import VOCAB, Driver, make_group, make_scheduler, undisturbed

PREFIX = [(5 * i * i + 1) % VOCAB for i in range(24)]
BEAMS = {"use_beam_search": True, "temperature": 0.0}


def run_all(driver: Driver, *groups: SequenceGroup, depth: int = 0, version: int = 0) -> None:
    driver.add(*groups)
    driver.drain(depth)
    for group in groups:
        driver.check_answers(group, version)


def cached(group: SequenceGroup) -> int:
    return group.seqs[0].num_cached_tokens


# ------------------------------------------------------------------------------------------------ prefixes


@pytest.mark.parametrize("budget", [64, 7])
def test_the_same_new_prefix_is_computed_once(budget):
    driver = Driver(make_scheduler(65, budget=budget, max_num_seqs=5, max_model_len=64))
    groups = [make_group(f"r{i}", [*PREFIX[:16], i], seed=i, max_tokens=1) for i in range(5)]
    driver.add(*groups)
    plan = driver.step()
    if budget == 64:  # all in one step, on the same pages
        assert plan is not None
        assert plan.q_lens.tolist() == [1, 1, 1, 1, 17]
        assert len({tuple(group.seqs[0].pages[:4]) for group in groups}) == 1
    driver.drain()
    assert driver.device.num_computed == 16 + 5
    assert [cached(group) for group in groups] == [0, 16, 16, 16, 16]
    for group in groups:
        driver.check_answers(group)


def test_without_a_prefix_cache_it_is_computed_by_each():
    driver = Driver(make_scheduler(65, budget=64, max_model_len=64, prefix_cache=False))
    groups = [make_group(f"r{i}", [*PREFIX[:16], i], max_tokens=1) for i in range(4)]
    run_all(driver, *groups)
    assert driver.device.num_computed == 4 * 17
    assert [cached(group) for group in groups] == [0] * 4


def test_a_cached_prompt_computes_one_token():
    driver = Driver(make_scheduler(65, budget=64))
    run_all(driver, make_group("a", PREFIX[:14], max_tokens=1))
    computed = driver.device.num_computed
    again = make_group("b", PREFIX[:14], max_tokens=1, seed=1)
    run_all(driver, again)
    assert (driver.device.num_computed, cached(again)) == (computed + 1, 13)
    assert driver.memory.num_copied_pages == 1  # of the partly filled page


def test_a_conversation_reuses_its_history():
    driver, history = Driver(make_scheduler(65, budget=64)), PREFIX[:6]
    for turn in range(4):
        group = make_group(f"turn {turn}", history, max_tokens=3, seed=turn)
        run_all(driver, group)
        if turn:
            assert cached(group) == len(history) - 3  # all but the last answer's last token and the new question
        history = [*group.seqs[0].tokens, 7, turn]


def test_salts_keep_requests_apart():
    driver = Driver(make_scheduler(65, budget=64))
    salts = [None, "x", "y", "x", None]
    groups = [make_group(f"r{i}", PREFIX[:14], cache_salt=salt, max_tokens=1) for i, salt in enumerate(salts)]
    for group in groups:
        run_all(driver, group)
    assert [cached(group) for group in groups] == [0, 0, 0, 13, 13]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_scores_of_a_prompt_are_never_taken_from_the_cache(prompt_logprobs):
    driver = Driver(make_scheduler(65, budget=64))
    run_all(driver, make_group("a", PREFIX[:14]))
    group = make_group("b", PREFIX[:14], prompt_logprobs=prompt_logprobs)
    run_all(driver, group)
    assert cached(group) == (13 if prompt_logprobs is None else 0)


def test_cached_tokens_are_those_of_the_first_time_also_after_a_preemption():
    driver = Driver(make_scheduler(num_pages=7, budget=32, page_size=4))
    run_all(driver, make_group("warm", PREFIX[:8], max_tokens=1))
    a, b = make_group("a", [2, 2, 3], max_tokens=14), make_group("b", PREFIX[:9], max_tokens=8)
    driver.add(a, b)
    driver.drain()
    assert b.num_preemptions > 0
    assert (cached(a), cached(b)) == (0, 8)
    queried = 8 + 3 + 9
    assert (driver.memory.num_queried_tokens, driver.memory.num_hit_tokens) == (queried, 8)
    for group in (a, b):
        driver.check_answers(group)


# ------------------------------------------------------------------------------------------------ several answers


@pytest.mark.parametrize(("prompt_len", "budget"), [(7, 16), (8, 16), (9, 8), (1, 16)])  # (9, 8): one token at the end
def test_answers_fork_at_the_end_of_the_prompt(prompt_len, budget):
    driver = Driver(make_scheduler(budget=budget))
    group = make_group("a", prompt_len, n=3, max_tokens=3)
    driver.add(group)
    while len(group.seqs) == 1:
        plan = driver.step()
    assert plan is not None
    assert (plan.q_lens[-2:].tolist(), plan.samples[-2:].tolist()) == ([0, 0], [True, True])
    assert plan.sources[-2:].tolist() == [plan.num_seqs - 3] * 2
    assert plan.starts[-2:].tolist() == [prompt_len] * 2
    assert [seq.index for seq in plan.seqs[-3:]] == [0, 1, 2]
    assert len({seq.state_index for seq in group.seqs}) == 3
    pages = -(-prompt_len // 4)
    assert driver.memory.allocator.num_used == pages  # shared by all
    plan = driver.step()
    assert plan is not None
    # All but one must copy the last page, if it is not full.
    assert len(plan.transfers.copies) == driver.memory.num_copied_pages == (2 if prompt_len % 4 else 0)
    driver.drain()
    driver.check_answers(group)
    assert driver.device.num_computed == prompt_len + 3 * 2
    assert len({tuple(seq.output_token_ids) for seq in group.seqs}) > 1


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_answers_that_come_back_share_their_prompt_again(prefix_cache, depth):
    driver = Driver(make_scheduler(num_pages=11, max_num_seqs=6, budget=32, prefix_cache=prefix_cache))
    first, group = make_group("a", 3, max_tokens=24), make_group("b", PREFIX[:9], n=3, max_tokens=7)
    driver.add(first, group)
    plans = driver.drain(depth)
    assert group.num_preemptions > 0
    for each in (first, group):
        driver.check_answers(each)
    resumed = [plan for plan in plans if sum(seq.group is group for seq in plan.admitted) == 3][-1]
    rows = [row for row in resumed.rows if row.seq.group is group]
    assert [row.start for row in rows if row.seq.index] == [8, 8] or prefix_cache


def test_an_answer_that_ends_early_gives_its_own_pages_back():
    stop = undisturbed(make_group("a", 8, seed=1).request, 0, 12).output[0]
    driver, group = Driver(make_scheduler()), make_group("a", 8, seed=1, n=2, max_tokens=6, stop_token_ids=[stop])
    driver.add(group)
    driver.step()
    driver.step()
    first, second = group.seqs
    assert (first.is_finished, second.is_finished, group.is_finished) == (True, False, False)
    assert driver.memory.allocator.num_used == 3
    driver.drain()
    driver.check_answers(group)


# ------------------------------------------------------------------------------------------------ sliding window


def test_pages_that_left_the_window_are_returned_while_the_sequence_runs():
    driver = Driver(make_scheduler(sliding_window=6, max_model_len=64, prefix_cache=False))
    group = make_group("a", 4, max_tokens=40)
    driver.add(group)
    most = 0
    while driver.step() is not None:
        most = max(most, driver.memory.allocator.num_used)
        assert driver.memory.allocator.num_used == sum(page != 0 for page in group.seqs[0].pages)
    assert most == 3  # 6 tokens that are seen, wherever they begin; 43 tokens have 11 pages
    driver.check_answers(group)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_longer_than_the_pool_is_served_with_a_window(prefix_cache):
    options = {"sliding_window": 6, "max_chunk_tokens": 4, "prefix_cache": prefix_cache}
    driver = Driver(make_scheduler(num_pages=6, max_model_len=64, **options))
    run_all(driver, make_group("a", 50, max_tokens=10), make_group("b", 30, max_tokens=30))
    with pytest.raises(PromptTooLongError, match=r"expected at most 19: .*the page pool of 20 tokens"):
        Driver(make_scheduler(num_pages=6, max_model_len=64)).add(make_group("a", 50))


def test_pinned_pages_are_left_behind_by_a_window():
    """So they do not help a sequence that begins with them: when it has left them it needs as many others."""
    driver = Driver(make_scheduler(num_pages=7, sliding_window=6, max_chunk_tokens=4, max_model_len=64))
    run_all(driver, pin("p", PREFIX[:12]))
    with pytest.raises(PromptTooLongError, match=r"the page pool of 12 tokens \(3 pages; 3 more are pinned\)"):
        driver.add(make_group("a", PREFIX[:14], max_tokens=30))


# ------------------------------------------------------------------------------------------------ pins


def pin(name: str, tokens: list[int], **options) -> SequenceGroup:
    return make_group(name, tokens, max_tokens=0, pin=True, **options)


def test_pinned_pages_stay_until_they_are_unpinned():
    driver = Driver(make_scheduler(num_pages=9))
    run_all(driver, pin("p", PREFIX[:6]))
    memory = driver.memory
    assert (memory.pins.num_pages, memory.allocator.num_used, memory.capacity) == (2, 2, 6)
    for i in range(3):  # go through all the other pages
        run_all(driver, make_group(f"r{i}", [i] * 20, max_tokens=4))
    group = make_group("b", [*PREFIX[:6], 9, 9], max_tokens=1)
    run_all(driver, group)
    assert cached(group) == 6
    assert driver.scheduler.unpin("p")
    assert not driver.scheduler.unpin("p")
    assert (memory.pins.num_pages, memory.allocator.num_used, memory.capacity) == (0, 0, 8)
    run_all(driver, make_group("big", [8] * 31, max_tokens=1), make_group("c", [*PREFIX[:6], 9, 9], max_tokens=1))


@pytest.mark.parametrize("depth", [0, 1])
def test_what_others_computed_is_pinned_and_not_a_copy_of_it(depth):
    driver = Driver(make_scheduler(num_pages=17, budget=5))
    first = make_group("a", PREFIX[:12], max_tokens=1)
    driver.add(first, pin("p", PREFIX[:12]))
    driver.drain(depth)
    assert driver.memory.pins.num_pages == 3
    for i in range(4):
        run_all(driver, make_group(f"r{i}", [i] * 28, max_tokens=4))
    group = make_group("b", PREFIX[:14], max_tokens=1)
    run_all(driver, group)
    assert cached(group) == 12


def test_a_pin_that_others_could_not_grow_beside_is_refused():
    driver = Driver(make_scheduler(num_pages=9))
    driver.add(make_group("a", 5, max_tokens=20))
    with pytest.raises(RequestError, match=r"'p' is to pin 2 of 8 pages, but request 'a'.* may need 7"):
        driver.add(pin("p", PREFIX[:8]))
    driver.add(pin("q", PREFIX[:4]))
    with pytest.raises(PromptTooLongError, match="page pool of 28 tokens"):  # though nothing is pinned yet
        driver.add(make_group("b", 5, max_tokens=26))
    driver.scheduler.abort("q")
    driver.add(make_group("b", 5, max_tokens=26))
    driver.drain()
    with pytest.raises(RequestError, match="there is no prefix cache"):
        Driver(make_scheduler(prefix_cache=False)).add(pin("p", PREFIX[:4]))


@pytest.mark.parametrize("when", ["waits", "in flight"])
def test_a_pin_that_was_aborted_or_taken_back_holds_nothing(when):
    for end in ("abort", "unpin"):
        driver = Driver(make_scheduler())
        driver.add(pin("p", PREFIX[:6]))
        if when == "in flight":
            driver.dispatch()
        assert getattr(driver.scheduler, end)("p")
        driver.drain()
        assert (driver.memory.pins.num_pages, driver.memory.capacity) == (0, 16)
        assert not driver.scheduler.unpin("p")


# ------------------------------------------------------------------------------------------------ weights


def test_nothing_of_other_weights_is_found():
    driver = Driver(make_scheduler(65, budget=64, host_pages=20))
    run_all(driver, pin("p", PREFIX[:8]), make_group("a", PREFIX, max_tokens=4))
    running = make_group("b", PREFIX[:18], max_tokens=10, n=2)
    driver.add(running)
    driver.step()
    driver.change_weights()
    for _ in range(4):  # so that it fills a page of old and new ones
        driver.step()
    assert (driver.memory.pins.num_pages, driver.memory.allocator.num_cached) == (0, 0)
    group = make_group("c", PREFIX[:18], max_tokens=3)
    run_all(driver, group, version=1)  # also beside `running`, and after its end
    assert cached(group) == 0
    assert [len(seq.output_token_ids) for seq in running.seqs] == [10, 10]
    again = make_group("d", [*PREFIX[:18], 3], max_tokens=3)
    run_all(driver, again, version=1)
    assert cached(again) == 18


# ------------------------------------------------------------------------------------------------ abort


@pytest.mark.parametrize(
    "options", [{}, {"n": 3}, {"n": 2, **BEAMS}, {"max_tokens": 0}, {"max_tokens": 0, "pin": True}]
)
@pytest.mark.parametrize("host_pages", [0, 20])
@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_frees_everything_at_once_in_every_state(options, host_pages, num_steps):
    options = {"max_tokens": 6, **options}
    driver = Driver(make_scheduler(num_pages=10, budget=5, host_pages=host_pages, preemption="swap"))
    first, group = make_group("a", 2, max_tokens=22), make_group("b", 9, seed=1, **options)
    driver.add(first, group)
    for _ in range(num_steps):
        driver.dispatch()
        if len(driver.in_flight) > 2:
            driver.collect()
    if num_steps == 7 and not group.is_finished and group.status is group.seqs[0].status and group.seqs[0].pages:
        driver.scheduler._queues.preempt(group)
    alive = not group.is_finished
    assert driver.scheduler.abort("b") == alive
    assert not driver.scheduler.abort("b")
    assert not driver.scheduler.abort("never seen")
    for seq in group.seqs:
        assert (seq.is_finished, seq.pages, seq.host_pages, seq.state_index, seq.num_pending) == (True, [], [], None, 0)
        assert not alive or seq.finish_reason == "abort"
    driver.scheduler.check_invariants()
    pinned = driver.memory.pins.num_pages
    assert pinned == (0 if alive or not group.request.pin else 3)
    assert driver.memory.allocator.num_used == len(first.seqs[0].pages) + pinned
    driver.drain()
    driver.check_answers(first)
    driver.scheduler.check_invariants()

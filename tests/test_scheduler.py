"""The scheduler, rule by rule. Who is served first and who gives way is in `test_scheduler_order`, whole traffic in
`test_scheduler_traffic` and `test_memory_machine`."""

import dataclasses
import re

import pytest

from jpaged.errors import ConfigError, PageStateError, PromptTooLongError, RequestError
from jpaged.sequence import SequenceStatus
from jpaged.step_plan import StepPlan
from tests.scheduler_driver import EOS, Driver, make_group, make_scheduler, undisturbed

# ------------------------------------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("prompt_len", "params", "error", "match"),
    [
        (0, {}, RequestError, "request 'a' has an empty prompt"),
        (32, {}, PromptTooLongError, "prompt of 32 tokens, expected at most 31.*max_model_len.*shorten the prompt"),
        (32, {"max_tokens": None}, PromptTooLongError, "prompt of 32 tokens, expected at most 31"),
        (33, {"max_tokens": 0}, PromptTooLongError, "prompt of 33 tokens, expected at most 32"),
        (30, {"max_tokens": 3}, PromptTooLongError, "30 prompt and 3 output.*lower max_tokens to 2 or pass None"),
        (30, {"max_tokens": None, "min_tokens": 3}, PromptTooLongError, "min_tokens 3.*lower min_tokens to 2"),
        (3, {"n": 5}, RequestError, r"5 sequences \(n, best_of\), expected at most max_num_seqs \(4\)"),
        (3, {"best_of": 6, "n": 2}, RequestError, "6 sequences"),
    ],
)
def test_refuses_what_can_never_fit_into_the_context(prompt_len, params, error, match):
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(error, match=match):
        scheduler.add(make_group("a", prompt_len, **params))
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("prompt_len", "params"), [(31, {"max_tokens": 1}), (31, {"max_tokens": None}), (32, {"max_tokens": 0})]
)
def test_takes_what_just_fits(prompt_len, params):
    driver, group = Driver(make_scheduler(num_pages=9, max_model_len=32)), make_group("a", prompt_len, **params)
    driver.add(group)
    driver.drain()
    (seq,) = group.seqs
    assert (len(seq.output_token_ids), seq.finish_reason) == (32 - prompt_len if prompt_len < 32 else 0, "length")


@pytest.mark.parametrize(
    ("prompt_len", "params", "match"),
    [
        (12, {}, r"prompt of 12 tokens, expected at most 11: .*the page pool of 12 tokens \(3 pages\)"),
        (10, {"max_tokens": 3}, "10 prompt and 3 output tokens, which exceeds the page pool"),
        # One shared page of the prompt, and one page for each of two: 8 tokens for each.
        (5, {"n": 2, "max_tokens": 4}, "5 prompt and 4 output tokens.*lower max_tokens to 3"),
        (8, {"n": 2, "max_tokens": 1}, "expected at most 7"),
    ],
)
def test_refuses_what_can_never_fit_into_the_pool(prompt_len, params, match):
    with pytest.raises(PromptTooLongError, match=match):
        make_scheduler(num_pages=4, max_model_len=32).add(make_group("a", prompt_len, **params))


@pytest.mark.parametrize(("n", "prompt_len", "length"), [(1, 5, 12), (2, 5, 8), (2, 9, 12), (3, 2, 4)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_max_tokens_outputs_end_where_the_pool_does(n, prompt_len, length, prefix_cache):
    num_pages = 4 if n != 2 or prompt_len == 5 else 5
    scheduler = make_scheduler(num_pages, max_model_len=32, prefix_cache=prefix_cache)
    driver, group = Driver(scheduler), make_group("a", prompt_len, max_tokens=None, n=n)
    driver.add(group)
    driver.drain()
    assert [(len(seq.tokens), seq.finish_reason) for seq in group.seqs] == [(length, "length")] * n
    assert group.num_preemptions == 0
    driver.check_answers(group)


def test_a_request_id_is_unique_among_live_requests():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_group("a", 3))
    scheduler.add(make_group("b", 3))
    scheduler.plan()
    for request_id in ("a", "b"):  # one runs, one waits
        with pytest.raises(RequestError, match=f"request '{request_id}' is still being served"):
            scheduler.add(make_group(request_id, 3))
    scheduler.abort("a")
    scheduler.add(make_group("a", 3))
    assert [group.request.request_id for group in scheduler.waiting] == ["b", "a"]


def test_a_finished_group_is_not_taken_again():
    scheduler, group = make_scheduler(), make_group("a", 3)
    scheduler.add(group)
    scheduler.abort("a")
    with pytest.raises(RequestError, match="request 'a' has already ended"):
        scheduler.add(group)


def test_a_context_of_one_token_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 1, expected at least 2"):
        make_scheduler(max_model_len=1)


# ------------------------------------------------------------------------------------------------ plans


def rows_of(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(row.seq.request.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def test_no_work_no_plan():
    scheduler = make_scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_prompts_are_chunked_to_the_budget_and_decode_rows_stand_first():
    driver = Driver(make_scheduler(budget=8))
    driver.add(make_group("a", 3), make_group("b", 12, seed=1), make_group("c", 2, seed=2))
    plan = driver.step()
    assert plan is not None
    assert rows_of(plan) == [("a", 0, 3, True), ("b", 0, 5, False)]
    assert [seq.request.request_id for seq in plan.admitted] == ["a", "b"]
    plan = driver.step()
    assert plan is not None
    assert rows_of(plan) == [("a", 3, 1, True), ("b", 5, 7, True)]
    assert (plan.num_decode, plan.num_tokens, plan.num_seqs, plan.admitted) == (1, 8, 2, ())
    assert rows_of(driver.step()) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 0, 2, True)]


def test_a_prompt_of_one_token_counts_as_a_decode_row():
    driver = Driver(make_scheduler())
    driver.add(make_group("a", 5), make_group("b", 1))
    plan = driver.step()
    assert rows_of(plan) == [("b", 0, 1, True), ("a", 0, 5, True)]
    assert plan is not None
    assert plan.num_decode == 1


@pytest.mark.parametrize("max_chunk_tokens", [None, 6])
def test_a_long_prompt_never_makes_those_wait_who_lack_one_token(max_chunk_tokens):
    """Though it comes first, by its priority."""
    options = {"max_model_len": 128, "policy": "priority", "max_chunk_tokens": max_chunk_tokens}
    driver = Driver(make_scheduler(65, budget=8, **options))
    long = make_group("long", 60, max_tokens=8, priority=-5)
    beams = {"use_beam_search": True, "temperature": 0.0}
    driver.add(make_group("a", 2, seed=1, max_tokens=20), make_group("b", 2, seed=2, max_tokens=20, n=2, **beams))
    driver.step()
    driver.add(long)
    while long.seqs[0].num_computed_tokens < 60:
        plan = driver.step()
        assert plan is not None
        names = [row.seq.request.request_id for row in plan.rows]
        assert names.count("a") == 1
        assert names.count("b") == 2
        assert "long" in names  # nor do they make it wait
        assert all(row.num_tokens <= (max_chunk_tokens or 8) for row in plan.rows)


def test_max_chunk_tokens_leaves_room_for_others():
    driver = Driver(make_scheduler(budget=12, max_chunk_tokens=5))
    driver.add(make_group("a", 20), make_group("b", 6, seed=1), make_group("c", 3, seed=2))
    assert rows_of(driver.step()) == [("a", 0, 5, False), ("b", 0, 5, False), ("c", 0, 2, False)]
    assert rows_of(driver.step()) == [("b", 5, 1, True), ("c", 2, 1, True), ("a", 5, 5, False)]


def test_pages_are_taken_when_needed_and_not_before():
    driver, group = Driver(make_scheduler()), make_group("a", 3, max_tokens=7)
    driver.add(group)
    held = []
    while driver.step() is not None:
        held.append(len(group.seqs[0].pages))
    assert held == [1, 1, 2, 2, 2, 2, 0]  # 3, 4, ... tokens in pages of 4; 9 are computed at the end, then none


def test_admission_asks_for_room_for_the_whole_prompt_not_for_its_first_chunk():
    driver = Driver(make_scheduler(num_pages=5, budget=8))
    driver.add(make_group("a", 5, max_tokens=2), make_group("b", 9, max_tokens=2, seed=1))
    assert rows_of(driver.step()) == [("a", 0, 5, True)]  # 2 pages are free: enough for 3 tokens of b, not for 9
    assert rows_of(driver.step()) == [("a", 5, 1, True)]
    assert rows_of(driver.step()) == [("b", 0, 8, False)]


def test_pages_for_the_rest_of_a_prompt_are_not_given_away():
    driver = Driver(make_scheduler(num_pages=8, max_chunk_tokens=4))
    driver.add(make_group("a", 20, max_tokens=1), make_group("b", 9, max_tokens=1, seed=1))
    for start in range(0, 20, 4):  # b needs 3 pages; a has taken 1, 2, ... of 5, and 7 are there
        assert rows_of(driver.step()) == [("a", start, 4, start == 16)]
    assert rows_of(driver.step()) == [("b", 0, 4, False)]


def test_rows_are_limited_and_the_smallest_free_state_index_is_given_out():
    driver = Driver(make_scheduler(max_num_seqs=3))
    driver.add(*(make_group(request_id, 1, max_tokens=3) for request_id in "abcdef"))
    driver.step()
    assert [seq.state_index for seq in driver.scheduler.running_seqs] == [0, 1, 2]
    driver.scheduler.abort("c")
    driver.scheduler.abort("a")
    driver.step()
    running = [(seq.request.request_id, seq.state_index) for seq in driver.scheduler.running_seqs]
    assert running == [("b", 1), ("d", 0), ("e", 2)]
    driver.drain()


def test_plans_are_immutable():
    scheduler = make_scheduler()
    scheduler.add(make_group("a", 3))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seqs = []  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------------------------------ run-ahead


def test_plans_run_ahead_of_results():
    driver, group = Driver(make_scheduler()), make_group("a", 3, max_tokens=2)
    (seq,) = group.seqs
    expected = undisturbed(group.request, 0, 5).output
    driver.add(group)
    assert rows_of(driver.dispatch()) == [("a", 0, 3, True)]
    assert (seq.num_pending, seq.num_tokens, len(seq.tokens)) == (1, 4, 3)
    assert rows_of(driver.dispatch()) == [("a", 3, 1, True)]
    assert seq.num_pending == 2
    assert driver.dispatch() is None  # all of its output is sampled
    assert driver.collect() == [expected[:1]]
    assert driver.dispatch() is None
    assert driver.collect() == [expected[1:]]
    assert (seq.num_pending, seq.finish_reason) == (0, "length")
    assert not driver.scheduler.has_work


def test_a_late_token_of_an_ended_sequence_is_dropped():
    first = undisturbed(make_group("a", 3).request, 0, 7).output[0]
    driver, group = Driver(make_scheduler()), make_group("a", 3, stop_token_ids=[first])
    driver.add(group)
    driver.dispatch()
    driver.dispatch()
    assert driver.collect() == [[first]]
    assert group.seqs[0].finish_reason == "stop"
    assert driver.collect() == [[]]
    assert group.seqs[0].output_token_ids == [first]


def test_a_preempted_sequence_waits_for_its_token_in_flight():
    driver = Driver(make_scheduler(num_pages=3, prefix_cache=False))  # 8 tokens
    a, b, c = make_group("a", 3, max_tokens=2), make_group("b", 3, max_tokens=4), make_group("c", 1, max_tokens=1)
    driver.add(a, b, c)
    (seq,) = b.seqs
    assert rows_of(driver.dispatch()) == [("a", 0, 3, True), ("b", 0, 3, True)]
    assert rows_of(driver.dispatch()) == [("a", 3, 1, True), ("b", 3, 1, True)]
    assert driver.dispatch() is None  # a has sampled all of its output; b gives up its page to none but itself
    assert (seq.status, seq.num_pending, b.num_preemptions) == (SequenceStatus.WAITING, 2, 1)
    driver.scheduler.abort("a")
    for _ in range(2):
        assert driver.scheduler.plan() is None  # room for b and c, but b's tokens are not known yet
        assert driver.collect() == [[], seq.tokens[-1:]]
    assert rows_of(driver.dispatch()) == [("b", 0, 5, True)]
    driver.drain()
    driver.check_answers(b)
    driver.check_answers(c)


def test_a_preempted_sequence_may_end_while_it_waits():
    driver = Driver(make_scheduler(num_pages=3, prefix_cache=False))
    a, b = make_group("a", 3, max_tokens=3), make_group("b", 3, max_tokens=2)
    driver.add(a, b)
    driver.dispatch()
    driver.dispatch()
    assert rows_of(driver.dispatch()) == [("a", 4, 1, True)]
    assert driver.scheduler.waiting == (b,)
    driver.collect()
    driver.collect()
    assert (b.seqs[0].finish_reason, len(b.seqs[0].output_token_ids)) == ("length", 2)
    assert driver.scheduler.waiting == ()
    driver.scheduler.check_invariants()


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({"ignore_eos": False}, [5, EOS], "stop", None),
        ({"ignore_eos": True}, [5, EOS, 7, 5], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS], "stop", EOS),
        ({"ignore_eos": False, "stop_token_ids": [EOS]}, [5, EOS], "stop", None),  # end-of-sequence comes first
        ({"stop_token_ids": [5]}, [5], "stop", 5),
        ({"stop_token_ids": [5], "min_tokens": 1}, [5, EOS, 7, 5], "stop", 5),
        ({"ignore_eos": False, "min_tokens": 2}, [5, EOS, 7, 5], "length", None),
        ({"ignore_eos": False, "min_tokens": 1}, [5, EOS], "stop", None),
        ({"stop_token_ids": [7], "max_tokens": 3}, [5, EOS, 7], "stop", 7),  # before the length limit
        ({"max_tokens": 1}, [5], "length", None),
    ],
)
def test_stop_rules(params, tokens, reason, stop_reason):
    scheduler, group = make_scheduler(), make_group("a", 3, **params)
    (seq,) = group.seqs
    scheduler.add(group)
    for token in [5, EOS, 7, 5]:
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.update(plan, [token])
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (tokens, reason, stop_reason)
    assert (seq.pages, seq.state_index, scheduler.has_work) == ([], None, False)


def test_a_negative_token_ends_its_own_sequence_only():
    scheduler = make_scheduler()
    a, b = make_group("a", 3, n=2), make_group("b", 4)
    scheduler.add(a)
    scheduler.add(b)
    plan = scheduler.plan()
    assert plan is not None
    assert rows_of(plan) == [("a", 0, 3, True), ("b", 0, 4, True), ("a", 3, 0, True)]
    assert scheduler.update(plan, [-1, 5, 6]) == ([[], [5], [6]], [0], {0})
    assert (a.seqs[0].finish_reason, a.seqs[0].output_token_ids, a.seqs[0].pages) == ("error", [], [])
    assert (a.seqs[1].finish_reason, a.seqs[1].output_token_ids) == (None, [6])
    assert scheduler.running == (a, b)


@pytest.mark.parametrize("depth", [0, 1])
def test_scoring_samples_nothing_and_ends_with_the_prompt(depth):
    driver, group = Driver(make_scheduler(budget=4)), make_group("a", 10, max_tokens=0, prompt_logprobs=0)
    driver.add(group)
    plans = []
    while (plan := driver.step(depth)) is not None:
        plans += rows_of(plan)
    assert plans == [("a", 0, 4, False), ("a", 4, 4, False), ("a", 8, 2, False)]
    (seq,) = group.seqs
    assert (seq.finish_reason, seq.output_token_ids, seq.num_pending) == ("length", [], 0)


def test_a_row_that_samples_nothing_is_not_read():
    scheduler, group = make_scheduler(budget=4), make_group("a", 10)
    scheduler.add(group)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.update(plan, [-1]).tokens == [[]]
    assert not group.is_finished


def test_update_wants_one_token_a_row():
    scheduler = make_scheduler()
    scheduler.add(make_group("a", 3))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match=re.escape("got 2 token ids, expected 1")):
        scheduler.update(plan, [1, 2])


def test_a_stop_string_in_the_last_token_outweighs_the_length():
    driver, group = Driver(make_scheduler()), make_group("a", 3, max_tokens=1)
    driver.add(group)
    driver.step()
    (seq,) = group.seqs
    assert seq.finish_reason == "length"
    driver.scheduler.finish(seq, "stop", "\n\n")
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "\n\n")


# ------------------------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda run, wait: run.pages.pop(), "page 2 counts 1 holders, expected 0"),
        (lambda run, wait: setattr(run, "num_computed_tokens", 4), "'a' is running with 2 pages, needs 1"),
        (lambda run, wait: setattr(run, "state_index", 1), "the rows that run are kept as"),
        (lambda run, wait: setattr(run, "status", SequenceStatus.WAITING), "the rows that run are kept as"),
        (lambda run, wait: setattr(run, "counters", list(run.counters)), "row 0 of the table is not its own"),
        (lambda run, wait: setattr(run, "num_tokens", 4), "'a' runs as"),
        (lambda run, wait: run.group.state_indices.append(0), "state indices in use and free are"),
        (lambda run, wait: wait.pages.append(3), "'b' waits with pages"),
        (lambda run, wait: setattr(wait, "num_computed_tokens", 1), "'b' waits with pages, computed tokens"),
        (lambda run, wait: setattr(wait, "state_index", 0), "'b' waits with .* a state index"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    scheduler = make_scheduler(max_num_seqs=1)
    run, wait = make_group("a", 5), make_group("b", 5)
    scheduler.add(run)
    scheduler.add(wait)
    scheduler.plan()
    scheduler.check_invariants()
    damage(run.seqs[0], wait.seqs[0])
    with pytest.raises(PageStateError, match=match):
        scheduler.check_invariants()

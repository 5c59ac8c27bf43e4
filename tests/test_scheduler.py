"""The scheduler, rule by rule. Random traffic is in `test_scheduler_traffic.py`."""

import dataclasses
import re

import pytest

from jpaged.errors import ConfigError, PageStateError, PromptTooLongError, RequestError
from jpaged.request import SequenceStatus
from jpaged.step_plan import SequenceUpdate, StepPlan
from tests.scheduler_driver import EOS, Driver, make_scheduler, make_seq, sampled_token, undisturbed

# ------------------------------------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("prompt_len", "params", "error", "match"),
    [
        (0, {}, RequestError, "request 'a' has an empty prompt"),
        (32, {}, PromptTooLongError, "prompt of 32 tokens, expected at most 31.*max_model_len.*shorten the prompt"),
        (32, {"max_tokens": None}, PromptTooLongError, "prompt of 32 tokens, expected at most 31"),
        (33, {"max_tokens": 0, "prompt_logprobs": 0}, PromptTooLongError, "prompt of 33 tokens, expected at most 32"),
        (30, {"max_tokens": 3}, PromptTooLongError, "30 prompt and 3 output.*lower max_tokens to 2 or pass None"),
        (30, {"max_tokens": None, "min_tokens": 3}, PromptTooLongError, "min_tokens 3.*lower min_tokens to 2"),
    ],
)
def test_refuses_what_can_never_fit_into_the_context(prompt_len, params, error, match):
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(error, match=match):
        scheduler.add(make_seq("a", prompt_len, **params))
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("prompt_len", "params"), [(31, {"max_tokens": 1}), (31, {"max_tokens": None}), (32, {"max_tokens": 0})]
)
def test_takes_what_just_fits(prompt_len, params):
    seq = make_seq("a", prompt_len, prompt_logprobs=0, **params)
    scheduler = make_scheduler(num_pages=9, max_model_len=32)
    scheduler.add(seq)
    Driver(scheduler).drain()
    assert (len(seq.output_token_ids), seq.finish_reason) == (32 - prompt_len if prompt_len < 32 else 0, "length")


@pytest.mark.parametrize(
    ("prompt_len", "params", "match"),
    [
        (12, {}, r"prompt of 12 tokens, expected at most 11: .*the page pool of 12 tokens \(3 pages\)"),
        (10, {"max_tokens": 3}, "10 prompt and 3 output tokens, which exceeds the page pool"),
    ],
)
def test_refuses_what_can_never_fit_into_the_pool(prompt_len, params, match):
    with pytest.raises(PromptTooLongError, match=match):
        make_scheduler(num_pages=4, max_model_len=32).add(make_seq("a", prompt_len, **params))


def test_without_max_tokens_an_output_ends_where_the_pool_does():
    scheduler, seq = make_scheduler(num_pages=4, max_model_len=32), make_seq("a", 5, max_tokens=None)
    scheduler.add(seq)
    Driver(scheduler).drain()
    assert (len(seq.tokens), seq.finish_reason, seq.num_preemptions) == (12, "length", 0)


def test_a_request_id_is_unique_among_live_requests():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_seq("a", 3))
    scheduler.add(make_seq("b", 3))
    scheduler.plan()
    for request_id in ("a", "b"):  # one runs, one waits
        with pytest.raises(RequestError, match=f"request '{request_id}' is still being served"):
            scheduler.add(make_seq(request_id, 3))
    scheduler.abort("a")
    scheduler.add(make_seq("a", 3))
    assert [seq.request.request_id for seq in scheduler.waiting] == ["b", "a"]


def test_a_finished_sequence_is_not_taken_again():
    scheduler, seq = make_scheduler(), make_seq("a", 3)
    scheduler.add(seq)
    scheduler.abort("a")
    with pytest.raises(RequestError, match="request 'a' has already ended"):
        scheduler.add(seq)


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
    for request_id, prompt_len in (("a", 3), ("b", 12), ("c", 2)):
        driver.scheduler.add(make_seq(request_id, prompt_len))
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
    driver.scheduler.add(make_seq("a", 5))
    driver.scheduler.add(make_seq("b", 1))
    plan = driver.step()
    assert rows_of(plan) == [("b", 0, 1, True), ("a", 0, 5, True)]
    assert plan is not None
    assert plan.num_decode == 1


def test_pages_are_taken_when_needed_and_not_before():
    driver = Driver(make_scheduler())
    driver.scheduler.add(make_seq("a", 3, max_tokens=7))
    seq = driver.scheduler.waiting[0]
    held = []
    while driver.step() is not None:
        held.append(len(seq.pages))
    assert held == [1, 1, 2, 2, 2, 2, 0]  # 3, 4, ... tokens in pages of 4; 9 are computed at the end, then none


def test_the_head_of_the_queue_blocks_those_behind_it():
    driver = Driver(make_scheduler(num_pages=5))  # 16 tokens
    for request_id, prompt_len in (("a", 7), ("b", 12), ("c", 1)):
        driver.scheduler.add(make_seq(request_id, prompt_len, max_tokens=2))
    assert rows_of(driver.step()) == [("a", 0, 7, True)]  # c would fit, but b is first
    assert rows_of(driver.step()) == [("a", 7, 1, True)]
    assert rows_of(driver.step()) == [("c", 0, 1, True), ("b", 0, 12, True)]


def test_admission_asks_for_room_for_the_whole_prompt_not_for_its_first_chunk():
    driver = Driver(make_scheduler(num_pages=5, budget=8))
    driver.scheduler.add(make_seq("a", 5, max_tokens=2))
    driver.scheduler.add(make_seq("b", 9, max_tokens=2))
    assert rows_of(driver.step()) == [("a", 0, 5, True)]  # 2 pages are free: enough for 3 tokens of b, not for 9
    assert rows_of(driver.step()) == [("a", 5, 1, True)]
    assert rows_of(driver.step()) == [("b", 0, 8, False)]


def test_rows_are_limited_and_the_smallest_free_state_index_is_given_out():
    driver = Driver(make_scheduler(max_num_seqs=3))
    for request_id in "abcdef":
        driver.scheduler.add(make_seq(request_id, 1, max_tokens=3))
    driver.step()
    assert [seq.state_index for seq in driver.scheduler.running] == [0, 1, 2]
    driver.scheduler.abort("c")
    driver.scheduler.abort("a")
    driver.step()
    assert [(seq.request.request_id, seq.state_index) for seq in driver.scheduler.running] == [
        ("b", 1),
        ("d", 0),
        ("e", 2),
    ]
    driver.drain()


def test_out_of_pages_preempts_the_newest_which_resumes_first():
    driver = Driver(make_scheduler(num_pages=4))  # 12 tokens
    a, b, c = make_seq("a", 4, max_tokens=5), make_seq("b", 4, max_tokens=5), make_seq("c", 1, max_tokens=5)
    for seq in (a, b, c):
        driver.scheduler.add(seq)
    assert rows_of(driver.step()) == [("c", 0, 1, True), ("a", 0, 4, True), ("b", 0, 4, True)]
    plan = driver.step()  # a and b need a second page each: that of c, then that of b itself
    assert plan is not None
    assert rows_of(plan) == [("a", 4, 1, True)]
    assert plan.preempted == (c, b)
    assert driver.scheduler.waiting == (b, c)
    for seq in (b, c):
        assert (seq.status, seq.pages, seq.num_computed_tokens) == (SequenceStatus.WAITING, [], 0)
        assert (seq.state_index, seq.num_preemptions, len(seq.output_token_ids)) == (None, 1, 1)
    assert driver.scheduler.num_preemptions == 2
    assert rows_of(driver.step()) == [("a", 5, 1, True)]  # b needs 2 pages with its 5 tokens; c may not pass it
    driver.drain()
    assert [len(seq.output_token_ids) for seq in (a, b, c)] == [5, 5, 5]


# ------------------------------------------------------------------------------------------------ run-ahead


def test_plans_run_ahead_of_results():
    driver = Driver(make_scheduler())
    seq = make_seq("a", 3, max_tokens=2)
    driver.scheduler.add(seq)
    assert rows_of(driver.dispatch()) == [("a", 0, 3, True)]
    assert (seq.num_pending, seq.num_tokens, len(seq.tokens)) == (1, 4, 3)
    assert rows_of(driver.dispatch()) == [("a", 3, 1, True)]
    assert seq.num_pending == 2
    assert driver.dispatch() is None  # all of its output is sampled
    assert [update.new_token for update in driver.collect()] == [sampled_token(seq, 3)]
    assert driver.dispatch() is None
    driver.collect()
    assert (seq.num_pending, seq.finish_reason) == (0, "length")
    assert not driver.scheduler.has_work


def test_a_late_token_of_an_ended_sequence_is_dropped():
    driver = Driver(make_scheduler())
    seq = make_seq("a", 3, stop_token_ids=[sampled_token(make_seq("a", 3), 3)])
    driver.scheduler.add(seq)
    driver.dispatch()
    driver.dispatch()
    assert [update.seq for update in driver.collect()] == [seq]
    assert seq.finish_reason == "stop"
    assert driver.collect() == []
    assert len(seq.output_token_ids) == 1


def test_a_preempted_sequence_waits_for_its_token_in_flight():
    driver = Driver(make_scheduler(num_pages=3))  # 8 tokens
    a, b = make_seq("a", 4, max_tokens=1), make_seq("b", 4, max_tokens=3)
    c = make_seq("c", 1, max_tokens=1)
    for seq in (a, b, c):
        driver.scheduler.add(seq)
    assert rows_of(driver.dispatch()) == [("a", 0, 4, True), ("b", 0, 4, True)]
    assert driver.dispatch() is None  # a has sampled all of its output; b gives up its page to none but itself
    assert (b.status, b.num_pending, b.num_preemptions) == (SequenceStatus.WAITING, 1, 1)
    driver.scheduler.abort("a")
    assert driver.scheduler.plan() is None  # room for b and c, but b's token is not known yet
    assert [update.new_token for update in driver.collect()] == [sampled_token(b, 4)]
    assert rows_of(driver.dispatch()) == [("b", 0, 5, True)]
    driver.drain()
    assert b.output_token_ids == undisturbed(b, 8)[0]


def test_a_preempted_sequence_may_end_while_it_waits():
    driver = Driver(make_scheduler(num_pages=3))
    a, b = make_seq("a", 4, max_tokens=2), make_seq("b", 4, max_tokens=1)
    driver.scheduler.add(a)
    driver.scheduler.add(b)
    driver.dispatch()
    assert rows_of(driver.dispatch()) == [("a", 4, 1, True)]
    assert driver.scheduler.waiting == (b,)
    driver.collect()
    assert (b.finish_reason, len(b.output_token_ids)) == ("length", 1)
    assert driver.scheduler.num_waiting == 0
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
    scheduler, seq = make_scheduler(), make_seq("a", 3, **params)
    scheduler.add(seq)
    for token in [5, EOS, 7, 5]:
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.update(plan, [token])
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (tokens, reason, stop_reason)
    assert (seq.pages, seq.state_index, scheduler.has_work) == ([], None, False)


def test_a_negative_token_ends_its_own_sequence_only():
    scheduler = make_scheduler()
    a, b = make_seq("a", 3), make_seq("b", 3)
    scheduler.add(a)
    scheduler.add(b)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.update(plan, [-1, 5]) == [SequenceUpdate(a, 0, None), SequenceUpdate(b, 1, 5)]
    assert (a.finish_reason, a.output_token_ids, a.pages) == ("error", [], [])
    assert scheduler.running == (b,)


@pytest.mark.parametrize("depth", [0, 1])
def test_scoring_samples_nothing_and_ends_with_the_prompt(depth):
    scheduler = make_scheduler(budget=4)
    seq = make_seq("a", 10, max_tokens=0, prompt_logprobs=0)
    scheduler.add(seq)
    driver, plans = Driver(scheduler), []
    while (plan := driver.step(depth)) is not None:
        plans += rows_of(plan)
    assert plans == [("a", 0, 4, False), ("a", 4, 4, False), ("a", 8, 2, False)]
    assert (seq.finish_reason, seq.output_token_ids, seq.num_pending) == ("length", [], 0)


def test_an_update_per_row_even_if_it_samples_nothing():
    scheduler, seq = make_scheduler(budget=4), make_seq("a", 10)
    scheduler.add(seq)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.update(plan, [-1]) == [SequenceUpdate(seq, 0, None)]  # not read: the row samples nothing
    assert not seq.is_finished


def test_update_wants_one_token_a_row():
    scheduler = make_scheduler()
    scheduler.add(make_seq("a", 3))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match=re.escape("got 2 token ids, expected 1")):
        scheduler.update(plan, [1, 2])


def test_abort_frees_everything_at_once():
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = make_seq("a", 5), make_seq("b", 5)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.plan()
    for seq in (b, a):  # waiting, then running with a token in flight
        assert scheduler.abort(seq.request.request_id)
        assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "abort")
        assert (seq.pages, seq.state_index, seq.num_pending) == ([], None, 0)
    assert not scheduler.abort("a")
    assert not scheduler.abort("never seen")
    assert scheduler._allocator.num_used == 0
    assert not scheduler.has_work


def test_a_stop_string_in_the_last_token_outweighs_the_length():
    driver = Driver(make_scheduler())
    seq = make_seq("a", 3, max_tokens=1)
    driver.scheduler.add(seq)
    driver.step()
    assert seq.finish_reason == "length"
    driver.scheduler.finish(seq, "stop", "\n\n")
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "\n\n")


# ------------------------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda run, wait: run.pages.pop(), "page 2 counts 1 holders, expected 0"),
        (lambda run, wait: setattr(run, "num_computed_tokens", 4), "'a' is running with 2 pages, needs 1"),
        (lambda run, wait: setattr(run, "status", SequenceStatus.WAITING), "'a' is waiting with 2 pages"),
        (lambda run, wait: setattr(run, "state_index", 1), "state indices in use and free are"),
        (lambda run, wait: wait.pages.append(3), "'b' waits and still has pages"),
        (lambda run, wait: setattr(wait, "num_computed_tokens", 1), "'b' waits and still has pages or computed tokens"),
        (lambda run, wait: setattr(wait, "state_index", 0), "'b' waits and has state index 0"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    scheduler = make_scheduler(max_num_seqs=1)
    run, wait = make_seq("a", 5), make_seq("b", 5)
    scheduler.add(run)
    scheduler.add(wait)
    scheduler.plan()
    scheduler.check_invariants()
    damage(run, wait)
    with pytest.raises(PageStateError, match=match):
        scheduler.check_invariants()


def test_plans_are_immutable():
    scheduler = make_scheduler()
    scheduler.add(make_seq("a", 3))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows = ()  # pyright: ignore[reportAttributeAccessIssue]

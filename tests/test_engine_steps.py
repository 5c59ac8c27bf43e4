"""Several decode steps in one program: the answers of single steps, whatever happens meanwhile."""

import pytest

from jpaged.request import SamplingParams
from jpaged.step_programs import Program
from tests.engine_driver import PROMPTS, check_pages, make_engine, serve, tokens_of
from tests.fakes import tiny_llama

STEPS = 4


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 21, "ignore_eos": True, **changes})


# Each ends elsewhere in a run of steps; five requests for four rows, so one waits at first.
PLAIN = [
    params(),
    params(temperature=1.0, seed=1, max_tokens=13),
    params(temperature=0.7, seed=2, max_tokens=26, top_k=1),
    params(temperature=1.3, seed=3, max_tokens=2),
    params(max_tokens=30),
]


@pytest.fixture(scope="module")
def single():
    return make_engine(tiny_llama())


@pytest.fixture(scope="module")
def several():
    return make_engine(tiny_llama(), decode_steps=STEPS)


def answers(engine, requests, **options) -> list:
    outputs = serve(engine, requests, **options)
    return [[(c.token_ids, c.finish_reason, c.stop_reason) for c in output.completions] for output in outputs]


def num_calls(engine, requests) -> int:
    for prompt, each in requests:
        engine.add(prompt, each)
    calls = 0
    while engine.has_work:
        engine.step()
        calls += 1
    return calls


def test_fewer_programs_give_the_same_answers(single, several):
    requests = list(zip(PROMPTS, PLAIN, strict=True))
    expected = answers(single, requests, cold=True)
    assert answers(several, requests, cold=True) == expected
    assert answers(several, requests) == expected  # prompts are found in the cache, tails too
    steps = [engine.stats().num_steps for engine in (single, several)]
    assert num_calls(several, requests[:1]) < num_calls(single, requests[:1]) / 2
    # They count as what they are; the one that runs ahead of the end is one of four.
    once, often = (engine.stats().num_steps - n for engine, n in zip((single, several), steps, strict=True))
    assert once <= often <= once + 2 * STEPS


def test_what_comes_after_a_stop_is_dropped(single, several):
    (whole,) = tokens_of(serve(single, [(PROMPTS[0], params(temperature=1.5, seed=9))]))
    for place in range(5, 10):
        stops = [whole[place], 63 - whole[place]]
        requests = [
            (PROMPTS[0], params(temperature=1.5, seed=9, stop_token_ids=stops)),
            (PROMPTS[2], params(temperature=1.5, seed=8, stop_token_ids=list(range(40, 64)))),  # more than fit
            (PROMPTS[1], params()),
        ]
        expected = answers(single, requests)
        assert expected[0][0][1] == "stop"
        assert answers(several, requests) == expected
        # What was cached of a sequence that stopped is its own text, and not what the device went on with.
        again = [
            ([*prompt, *found[0][0], 3, 9], params(max_tokens=4))  # the next turn reads the token that ended this one
            for (prompt, _), found in zip(requests, expected, strict=True)
        ]
        assert answers(several, again) == answers(single, again, cold=True)


def test_the_next_turn_finds_no_token_that_the_device_left_uncomputed(single, several):
    prompt, draws = [5, 4, 3, 2, 1, 0, 7, 7, 7], {"temperature": 1.5, "seed": 1}
    (whole,) = tokens_of(serve(single, [(prompt, params(**draws))], cold=True))
    for place in range(4, 12):
        serve(several, [([11] * 40, params())], cold=True)  # pages hold something else
        requests = [(prompt, params(**draws, stop_token_ids=[whole[place]]))]
        (answer,) = tokens_of(serve(several, requests, cold=True))
        turn = [([*prompt, *answer, 3, 9, 20, 33], params(max_tokens=4, logprobs=0))]
        (found,), (expected,) = serve(several, turn), serve(single, turn, cold=True)
        assert found.num_cached_tokens >= len(prompt)
        told = [[token.logprob for token in output.completions[0].logprobs] for output in (found, expected)]
        assert told[0] == pytest.approx(told[1], abs=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        {"logprobs": 1},
        {"temperature": 1.0, "seed": 5, "top_p": 0.8},
        {"presence_penalty": 1.5},
        {"min_tokens": 8, "stop_token_ids": [1, 2, 3, 4, 5]},
        {"logit_bias": {3: 50.0}},
        {"temperature": 1.0, "seed": 6, "n": 2},
    ],
    ids=str,
)
def test_rows_that_ask_for_more_are_served_too(single, several, other):
    requests = [(PROMPTS[0], params()), (PROMPTS[2], params(max_tokens=11, **other))]
    assert answers(several, requests) == answers(single, requests, cold=True)


def test_they_have_a_shape_where_all_buckets_are_larger(single):
    wide = make_engine(tiny_llama(), decode_steps=STEPS, token_buckets=(64,))
    assert [shape.num_steps for shape in wide.step_shapes] == [1, STEPS]
    requests = list(zip(PROMPTS, PLAIN, strict=True))
    assert num_calls(wide, requests[:1]) < num_calls(single, requests[:1]) / 2
    assert answers(wide, requests) == answers(single, requests, cold=True)


def test_a_pool_that_is_too_small_preempts_as_ever(single):
    tight = make_engine(tiny_llama(), decode_steps=STEPS, num_pages=10, length=32)
    rows = [(prompt, {"temperature": 0.9, "seed": index}) for index, prompt in enumerate(PROMPTS)]
    # To the longest length that there is: the host does not look ahead beyond it.
    found = answers(tight, [(prompt, params(max_tokens=None, **row)) for prompt, row in rows])
    requests = [(prompt, params(max_tokens=32 - len(prompt), **row)) for prompt, row in rows]
    assert found == answers(single, requests, cold=True)
    assert tight.stats().num_preemptions > 0
    assert any(done.program.part == "decode" for done in tight._runner.compilations)


def test_an_abort_and_a_late_request_change_nothing_for_others(single, several):
    expected = tokens_of(serve(single, [(PROMPTS[0], params(max_tokens=40)), (PROMPTS[1], params())], cold=True))
    several.add(PROMPTS[0], params(max_tokens=40), request_id="stays")
    several.add(PROMPTS[2], params(max_tokens=40), request_id="goes")
    done = {}
    for step in range(40):
        done.update((output.request_id, output) for output in several.step())
        check_pages(several)
        if step == 4:
            aborted = several.abort("goes")
            assert aborted.finish_reason == "abort"
            several.add(PROMPTS[1], params(), request_id="late")
    assert [done[name].token_ids for name in ("stays", "late")] == [tuple(tokens) for tokens in expected]
    (whole,) = tokens_of(serve(single, [(PROMPTS[2], params(max_tokens=40))]))
    assert list(aborted.token_ids) == whole[: len(aborted.token_ids)]


def test_all_that_may_come_is_compiled_at_start(several):
    serve(several, [(PROMPTS[0], params())])
    programs = several._runner.programs(several.step_shapes)
    several_steps = [program for program in programs if program.part == "decode"]
    assert [str(program) for program in several_steps] == ["decode T4 S4 P16 x4"]
    assert {done.program for done in several._runner.compilations} <= {*programs}
    assert Program("forward", several_steps[0].size) not in programs
    memory = several._runner._executables[several_steps[0]].memory_analysis()
    assert memory.alias_size_in_bytes >= several.pool_plan.pool_bytes > memory.temp_size_in_bytes  # pages stay in place

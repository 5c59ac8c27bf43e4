"""Masks follow the tokens of each sequence; what cannot go on ends alone."""

import time

import numpy as np
import pytest

from jpaged import constraints, grammar_compiler
from jpaged.constraints import Constraints
from jpaged.grammar_compiler import Compilation
from jpaged.structured import FORM_FAILED, FORM_TOO_COMPLEX, StructuredOutput
from tests.constraints_driver import END, Run, byte


def test_masks_follow_the_output_to_its_end():
    run = Run()
    group = run.add(structured=StructuredOutput(choice=["ab", "ac"]))
    assert run.step(byte("a")) == [[byte("a")]]
    assert run.step(byte("c")) == [sorted([byte("b"), byte("c")])]
    assert run.step(END) == [[END]]
    assert group.seqs[0].finish_reason == "stop"
    assert run.constraints.counter.num_masks == 2
    run.add("free")
    run.constraints.due(run.scheduler.plan())
    assert not run.constraints._states


def test_answers_begin_alike_and_go_their_own_ways():
    run = Run()
    run.add(structured=StructuredOutput(choice=["ab", "cd"]), n=2, temperature=1.0)
    start = sorted([byte("a"), byte("c")])
    assert run.step(byte("a"), byte("c")) == [start, start]
    assert run.step(byte("b"), byte("d")) == [[byte("b")], [byte("d")]]
    assert run.step(END, END) == [[END], [END]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["a", "a$", "$"]),
        ({"ignore_eos": True}, ["a", "a", "$"]),
        ({"min_tokens": 2}, ["a", "a", "$"]),
        ({"min_tokens": 8}, ["a", "a", "$"]),  # the form wins
        ({"allowed_token_ids": [byte("a")]}, ["a", "a", ""]),
        ({"min_tokens": 2, "stop_token_ids": [byte("a")]}, ["a", "$", "$"]),
    ],
    ids=str,
)
def test_what_else_decides_about_the_end(options, expected):
    run = Run()
    run.add(structured=StructuredOutput(regex="a{1,2}"), **{"max_tokens": 9, **options})
    symbols = {"a": byte("a"), "$": END}
    for allowed in expected:
        wanted = sorted(symbols[symbol] for symbol in allowed)
        got = run.step(byte("a"))[0]
        if options.get("stop_token_ids") and got == [byte("a")]:
            return  # it ends there, since nothing but the stop token may come
        assert got == wanted


def test_a_dead_end_allows_nothing_and_says_so():
    run = Run()
    group = run.add(structured=StructuredOutput(regex="ab"), allowed_token_ids=[byte("a"), END])
    assert run.step(byte("a")) == [[byte("a")]]
    assert run.step(-1) == [[]]
    assert group.seqs[0].finish_reason == "error"
    assert group.error.startswith("the form cannot be continued with any token that is allowed")


def test_a_dead_end_at_the_start():
    run = Run()
    group = run.add(structured=StructuredOutput(regex="ab"), allowed_token_ids=[byte("b")])
    assert run.step(-1) == [[]]
    assert group.error.startswith("the form cannot be continued")


def test_a_token_that_was_not_allowed_ends_that_sequence_alone():
    run = Run()
    wrong, right = (run.add(name, structured=StructuredOutput(regex="ab")) for name in "xy")
    run.step(byte("b"), byte("a"))
    assert run.step(-1, byte("b")) == [[], [byte("b")]]
    assert wrong.error.startswith(FORM_FAILED)
    assert right.error is None


def test_a_form_that_takes_too_much_is_the_fault_of_who_asked(monkeypatch):
    from llguidance import LLParserLimits

    monkeypatch.setattr("jpaged.grammar._limits", lambda: LLParserLimits(step_max_items=4, verbose_errors=False))
    run = Run()
    group = run.add(structured=StructuredOutput(grammar="start: (A|B)*\nA: /(a|b)*a(a|b){9}/\nB: /[ab]c/"))
    run.step(byte("a"))
    run.settle()
    assert group.error.startswith(FORM_TOO_COMPLEX)


def test_a_failure_on_the_thread_ends_these_sequences_alone(monkeypatch):
    run = Run()
    group = run.add(structured=StructuredOutput(regex="ab"))
    with monkeypatch.context() as patch:
        patch.setattr(Constraints, "_fill", lambda self, items: 1 // 0)
        run.step(byte("a"))
        run.settle()
    other = run.add("other", structured=StructuredOutput(regex="ab"))
    assert run.step(-1, byte("a")) == [[], [byte("a")]]
    assert group.error == f"{FORM_FAILED} (ZeroDivisionError('integer division or modulo by zero'))"
    assert run.step(byte("b")) == [[byte("b")]]
    assert other.error is None


def test_clear_forgets_all():
    run = Run()
    run.add("a", structured=StructuredOutput(regex="ab"))
    run.step(byte("a"))
    run.add("b", structured=StructuredOutput(regex="ab"))
    run.constraints.clear()
    assert not run.constraints.is_working
    assert not run.constraints._states


def test_refusals_reach_their_requests(monkeypatch):
    run = Run()
    bad, good = run.add("bad", structured=StructuredOutput(regex="(a")), run.add("good")
    run.settle()
    assert [why.partition(":")[0] for why in run.refused] == ["structured.regex is refused"]
    assert bad.is_finished
    assert not good.is_finished

    go = []
    slow = grammar_compiler.compile_grammar

    def compile_slowly(*args):
        while not go:
            time.sleep(0.001)
        return slow(*args)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_slowly)
    run.constraints._compile_limit_s = -1.0
    late = run.add("late", structured=StructuredOutput(regex="late"))
    run.settle()
    assert late.is_finished
    assert run.refused[-1] == "structured.regex was still being compiled after -1 s: make it simpler"
    go.append(True)


def test_who_has_left_or_was_lost_wants_no_grammar(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "jpaged.grammar_compiler.GrammarCompiler.submit",
        lambda self, structured, wanted: asked.append(wanted) or Compilation(structured),
    )
    run = Run()
    for name in "abc":
        run.add(name, structured=StructuredOutput(regex=name))
    run.scheduler.abort("a")
    assert [wanted() for wanted in asked] == [False, True, True]
    run.constraints = Constraints(None, 300, [END])  # as an engine does that restarts
    assert not any(wanted() for wanted in asked)


def test_an_aborted_request_is_forgotten():
    run = Run()
    run.add("early", structured=StructuredOutput(regex="ab"))
    run.scheduler.abort("early")
    run.settle()
    run.add("late", structured=StructuredOutput(regex="ab"))
    run.step(byte("a"))
    run.scheduler.abort("late")
    run.settle()
    run.add("free")
    run.constraints.due(run.scheduler.plan())
    assert not run.constraints._states
    assert not run.constraints._compiling


def test_a_plan_does_not_wait_long_for_a_slow_mask(monkeypatch):
    run = Run()
    run.add(structured=StructuredOutput(regex="a+"))
    go = []
    fill = Constraints._fill

    def fill_slowly(self, items):
        while not go:
            time.sleep(0.001)
        fill(self, items)

    monkeypatch.setattr(Constraints, "_fill", fill_slowly)
    monkeypatch.setattr(constraints, "_GRACE_S", 0.0)
    run.step(byte("a"))
    run.poll()
    assert run.constraints.is_working
    assert run.scheduler.plan() is None
    go.append(True)
    run.settle()
    assert run.scheduler.plan() is not None


def test_requests_without_a_form_cost_nothing():
    run = Run()
    run.add()
    run.settle()
    plan = run.scheduler.plan()
    assert run.constraints.due(plan) == []
    run.constraints.advance(plan)
    assert run.constraints.counter.num_masks == 0
    assert run.constraints._thread is None


def test_all_masks_are_words_of_the_models_vocabulary():
    run = Run()
    run.add(structured=StructuredOutput(regex="[a-z]+"))
    run.settle()
    ((_, mask),) = run.constraints.due(run.scheduler.plan())
    assert (mask.dtype, mask.shape) == (np.uint32, (10,))

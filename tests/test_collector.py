"""The results of steps become outputs: of each request its own, once, whatever happens to the others."""

import math
import time
from collections import deque

import numpy as np
import pytest

from jpaged.collector import Collector
from jpaged.config import SchedulerConfig
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.incremental_decoder import IncrementalDecoder
from jpaged.memory_manager import MemoryManager
from jpaged.request import Output, Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from jpaged.step_outputs import DispatchedStep, StepOutputs
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")
TOP = 4


class Steps:
    """A scheduler and a collector over steps whose results are made up."""

    def __init__(self, text: str = "abcdefgh" * 3) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), MemoryManager.for_pool(33, 4), max_model_len=32
        )
        self.collector = Collector(self.scheduler, TOKENIZER)
        self.tokens: list[int] = TOKENIZER.encode(text)
        self.in_flight: deque[DispatchedStep] = deque()
        self.bad: dict[str, int] = {}  # what a row of a request samples instead
        self.prompt_logprob = -1.0
        self.top_logprobs = -np.arange(1, TOP + 1, dtype=np.float32)

    def add(self, name: str, prompt=(5, 6, 7), *, stream: bool = False, **params) -> SequenceGroup:
        params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
        group = SequenceGroup(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params))
        self.scheduler.add(group)
        self.collector.open(group, None, stream=stream)
        return group

    def dispatch(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        seqs, num_tokens = plan.num_seqs, plan.num_tokens
        outputs = StepOutputs(
            token_ids=np.array([self.sampled(row) for row in plan.rows], np.int32),
            logprobs=np.array([-0.5 - row.seq.index for row in plan.rows], np.float32),
            top_ids=np.tile(np.array(self.tokens[:TOP], np.int32), (seqs, 1)),
            top_logprobs=np.tile(self.top_logprobs, (seqs, 1)),
            prompt_logprobs=np.full(num_tokens, self.prompt_logprob, np.float32),
            prompt_top_ids=np.zeros((num_tokens, TOP), np.int32),
            prompt_top_logprobs=np.zeros((num_tokens, TOP), np.float32),
        )
        self.in_flight.append(DispatchedStep(plan, outputs))
        return True

    def sampled(self, row) -> int:
        bad = self.bad.get(row.seq.request.request_id)
        return self.tokens[row.kv_len - row.seq.num_prompt_tokens] if bad is None else bad

    def collect(self) -> list[Output]:
        done = self.in_flight.popleft()
        return self.collector.collect(done, done.outputs.token_ids)

    def step(self) -> list[Output]:
        assert self.dispatch()
        return self.collect()

    def drain(self) -> list[Output]:
        outputs = []
        while len(self.collector):
            outputs += self.step()
        self.scheduler.check_invariants()
        assert not self.scheduler.has_work
        return outputs


def test_each_request_gets_one_output_at_its_end():
    steps = Steps()
    for index in range(3):
        steps.add(f"{index}", max_tokens=2 + index)
    assert all(name in steps.collector for name in "012")
    outputs = steps.drain()
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [output.text for output in outputs] == ["ab", "abc", "abcd"]
    assert all(output.finished for output in outputs)
    assert (steps.collector.num_finished, steps.collector.num_generated_tokens) == (3, 9)
    assert "1" not in steps.collector


def test_streams_advance_once_a_step_whatever_their_number_of_answers():
    steps = Steps()
    steps.add("many", n=3, stream=True)
    steps.add("whole")
    seen = []
    while len(steps.collector):
        outputs = steps.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        seen += outputs
    texts = [[completion.text for completion in output.completions] for output in seen if output.request_id == "many"]
    assert texts == [[text] * 3 for text in ("a", "ab", "abc", "abcd")]
    assert [output.finished for output in seen if output.request_id == "many"] == [False, False, False, True]
    assert steps.collector.num_generated_tokens == 16


def test_text_is_made_when_it_is_shown(monkeypatch):
    steps, made = Steps(), []
    decode = IncrementalDecoder.add_all
    monkeypatch.setattr(IncrementalDecoder, "add_all", lambda *args: made.append(len(args[1])) or decode(*args))
    steps.add("at the end", max_tokens=5)
    for count in range(1, 5):
        assert steps.step() == []
        assert (made, steps.collector.num_generated_tokens) == ([], count)
    (output,) = steps.step()
    assert (output.text, made) == ("abcde", [5])
    steps.add("streams", stream=True, max_tokens=2)
    steps.add("may stop", stop="x", max_tokens=2)
    outputs = steps.step() + steps.step()
    assert [(output.request_id, output.text) for output in outputs] == [
        ("streams", "a"),
        ("streams", "ab"),
        ("may stop", "ab"),
    ]
    assert made == [5, *[1] * 4]


def test_times_are_those_of_the_steps_that_brought_tokens(monkeypatch):
    steps, now = Steps(), iter(range(1, 100))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(now) * 10**9)
    steps.add("one", max_tokens=3)
    steps.add("many", n=2, max_tokens=4, temperature=1.0)
    outputs = {output.request_id: output.timing for output in steps.drain()}
    assert {name: (timing.first_token_s, timing.last_token_s) for name, timing in outputs.items()} == {
        "one": (1, 3),
        "many": (1, 4),
    }
    gaps = steps.collector.metrics.histograms()["inter_token_latency_seconds"]
    assert (gaps.count, gaps.sum) == (5, 5.0)  # a second each, of a request, however many answers it has


def test_an_answer_that_ends_early_leaves_the_others_running():
    steps = Steps()
    group = steps.add("n", n=2, stream=True)
    steps.step()
    steps.scheduler.finish(group.seqs[0], "stop")  # as its stop token would
    (output,) = steps.step()
    assert [completion.text for completion in output.completions] == ["a", "ab"]
    assert [completion.finish_reason for completion in output.completions] == ["stop", None]
    (last,) = steps.drain()[-1:]
    assert [completion.text for completion in last.completions] == ["a", "abcd"]
    assert steps.collector.num_finished == 1


def test_a_stop_string_ends_one_answer_and_drops_what_is_in_flight():
    steps = Steps()
    steps.add("stops", stop="bc", max_tokens=8)
    steps.add("goes on", max_tokens=5)
    outputs = []
    steps.dispatch()
    while len(steps.collector):
        steps.dispatch()  # one step ahead
        outputs += steps.collect()
    assert [(o.request_id, o.text, o.finish_reason, o.stop_reason) for o in outputs] == [
        ("stops", "a", "stop", "bc"),
        ("goes on", "abcde", "length", None),
    ]
    assert len(outputs[0].token_ids) == 3
    while steps.in_flight:
        assert steps.collect() == []


def test_a_new_request_of_an_old_name_gets_nothing_of_the_old_one():
    steps = Steps()
    steps.add("a")
    steps.dispatch()
    aborted = steps.collector.abort("a")
    assert (aborted.finish_reason, aborted.text, aborted.finished) == ("abort", "", True)
    steps.add("a", max_tokens=1)
    assert steps.collect() == []
    (output,) = steps.drain()
    assert (output.text, output.finish_reason) == ("a", "length")
    assert steps.collector.num_finished == 2


def test_an_abort_gives_what_there_is_and_shows_what_was_held_back():
    steps = Steps()
    steps.add("a", n=2, stop="bz")
    for _ in range(2):
        assert steps.step() == []
    output = steps.collector.abort("a")
    assert [completion.text for completion in output.completions] == ["ab", "ab"]
    assert [completion.finish_reason for completion in output.completions] == ["abort", "abort"]
    assert steps.collector.abort("a") is None
    assert steps.scheduler.plan() is None


def test_all_are_dropped_without_an_output():
    steps = Steps()
    for index in range(3):
        steps.add(f"{index}")
    steps.step()
    steps.collector.drop_all()
    assert (len(steps.collector), steps.scheduler.has_work) == (0, False)
    steps.scheduler.check_invariants()


def test_nan_ends_an_answer_and_the_request_says_so():
    steps = Steps()
    steps.add("bad", max_tokens=4)
    steps.add("good", max_tokens=2)
    steps.bad["bad"] = -1
    outputs = {output.request_id: output for output in steps.drain()}
    assert (outputs["bad"].finish_reason, outputs["bad"].token_ids) == ("error", ())
    assert "NaN" in outputs["bad"].error
    assert (outputs["good"].text, outputs["good"].error) == ("ab", None)


def test_nan_in_the_prompts_log_probabilities_ends_the_request():
    steps = Steps()
    steps.add("bad", prompt_logprobs=0, n=2)
    steps.add("good")
    steps.prompt_logprob = math.nan
    outputs = {output.request_id: output for output in steps.drain()}
    assert (outputs["bad"].finish_reason, outputs["bad"].token_ids) == ("error", ())
    assert "NaN" in outputs["bad"].error
    assert outputs["good"].text == "abcd"


def test_prompt_log_probabilities_of_an_ended_request_are_nobodys():
    steps = Steps()
    steps.add("a", prompt_logprobs=0)
    steps.dispatch()
    steps.collector.abort("a")
    steps.add("a", prompt=(8, 9))
    steps.collect()
    (output,) = steps.drain()
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("method", ["add_token", "finish"])
def test_a_fault_of_one_request_ends_that_request_alone(method, monkeypatch, caplog):
    steps = Steps()
    group = steps.add("faulty", n=2)
    steps.add("other")

    def fail(*args, **kwargs):
        raise ValueError("no such text")

    monkeypatch.setattr(steps.collector._live["faulty"].builder, method, fail)
    outputs = {output.request_id: output for output in steps.drain()}
    error = outputs["faulty"].error
    assert error == "an internal error (ValueError) ended this request; the engine's log says where"
    assert "test_collector.py" in caplog.text
    assert "no such text" not in caplog.text  # which may quote a prompt
    assert [completion.finish_reason for completion in outputs["faulty"].completions] == ["error", "error"]
    assert all(not seq.pages for seq in group.seqs)
    assert outputs["other"].text == "abcd"


@pytest.mark.parametrize("stream", [False, True, "deltas"])
def test_a_fault_in_making_text_ends_that_request_alone(stream, monkeypatch):
    steps = Steps()
    group = steps.add("faulty", stream=stream)
    steps.add("other", stream=stream)

    def fail(*args):
        raise ValueError("no such text")

    completion = steps.collector._live["faulty"].builder._builder(group.seqs[0])
    monkeypatch.setattr(completion._decoder, "add_all", fail)
    outputs = {output.request_id: output for output in steps.drain()}  # the last one of each
    assert outputs["faulty"].finish_reason == "error"
    assert "an internal error (ValueError)" in outputs["faulty"].error
    assert not group.seqs[0].pages
    assert outputs["other"].text == "abcd"


def test_the_best_answers_are_given():
    steps = Steps()
    steps.add("best", n=1, best_of=3)
    (output,) = steps.drain()
    (completion,) = output.completions
    assert completion.cumulative_logprob == -2.0  # the first: the others are less likely by 1 and 2 a token
    assert completion.logprobs is None
    assert steps.collector.num_generated_tokens == 12


@pytest.mark.parametrize("length", [1, 3])
def test_a_beam_search_gives_its_hypotheses_and_counts_their_tokens(length):
    steps = Steps()
    steps.add("beams", n=2, use_beam_search=True, temperature=0.0, max_tokens=length)
    (output,) = steps.drain()
    assert [completion.finish_reason for completion in output.completions] == ["length"] * 2
    first, second = (completion.cumulative_logprob for completion in output.completions)
    assert (first, second) == (-length, -length - 1)  # always the likeliest; once the second
    assert output.text == "a" * length
    assert steps.collector.num_generated_tokens == 2 * length
    assert steps.collector.num_finished == 1


def test_a_beam_search_that_finds_nothing_is_an_error():
    steps = Steps()
    steps.top_logprobs[1:] = -math.inf  # one token alone is possible, and it may not come yet
    steps.add("beams", n=2, use_beam_search=True, temperature=0.0, min_tokens=1, stop_token_ids=steps.tokens[:1])
    (output,) = steps.drain()
    assert (output.finish_reason, output.token_ids, len(output.completions)) == ("error", (), 1)
    assert "no token was left" in output.error


def test_a_prompt_alone_ends_when_it_is_computed():
    steps = Steps()
    steps.add("prompt", prompt=range(20), max_tokens=0)
    assert steps.step() == []
    (output,) = steps.step()
    assert (output.finish_reason, output.token_ids, output.finished) == ("length", (), True)

"""Several tokens of a row at once become the same outputs as one after the other."""

import itertools
import time

import numpy as np
import pytest

from jpaged.collector import Collector
from jpaged.config import SchedulerConfig
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.memory_manager import MemoryManager
from jpaged.request import Output, Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from jpaged.step_outputs import DispatchedStep, StepOutputs
from jpaged.step_plan import StepPlan
from jpaged.tokenizer import Tokenizer
from tests.scheduler_driver import Oracle
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")
TEXT = TOKENIZER.encode("abcdefghijklmnop")


class Guesses(Oracle):
    """Two tokens in each step, as long as there are so many; the first one comes true, and every third second one."""

    def counts(self, seqs, num_rows, *, ahead=False):
        return [max(min(2, seq.limit - len(seq.tokens) - 1), 0) for seq in seqs]

    def follow(self, seqs):
        for seq in seqs:
            seq.guesser = Guess()  # type: ignore[assignment]
        return [*range(len(seqs))]


class Guess:
    def guess(self, tokens, count):
        following = TEXT[len(tokens) - 3 :][:count]
        return [following[0], *(token + (len(tokens) % 3 > 0) for token in following[1:])]


class Steps:
    """A scheduler and a collector over steps that sample the text, whatever is guessed."""

    def __init__(self, speculation=None) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            MemoryManager.for_pool(33, 4),
            max_model_len=32,
            speculation=speculation,
        )
        self.collector = Collector(self.scheduler, TOKENIZER)
        self.num_steps = 0

    def add(self, name: str, *, stream: bool = False, **params) -> SequenceGroup:
        params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
        group = SequenceGroup(Request(request_id=name, prompt_token_ids=(5, 6, 7), params=params))
        self.scheduler.add(group)
        self.collector.open(group, None, stream=stream)
        return group

    def step(self) -> list[Output]:
        plan = self.scheduler.plan()
        assert plan is not None
        self.num_steps += 1
        places = [(row, int(position)) for row, position in enumerate(plan.positions)]
        if plan.drafts is not None:
            guesses = zip(plan.drafts.rows.tolist(), plan.drafts.places.tolist(), strict=True)
            places += [(row, int(plan.positions[row]) + 1 + place) for row, place in guesses]
        tokens = np.array([TEXT[position - 3] for _, position in places], np.int32)
        outputs = StepOutputs(
            token_ids=tokens,
            logprobs=np.array([-float(position) for _, position in places], np.float32),
            top_ids=tokens[:, None],
            top_logprobs=np.zeros((len(tokens), 1), np.float32),
        )
        return self.collector.collect(DispatchedStep(plan, outputs), tokens)

    def drain(self) -> list[Output]:
        outputs = []
        while len(self.collector):
            outputs += self.step()
        self.scheduler.check_invariants()
        return outputs


@pytest.fixture
def guessing() -> Steps:
    return Steps(Guesses(2, None))


@pytest.mark.parametrize(
    "params",
    [{}, {"max_tokens": 5}, {"n": 3}, *({"stop": end} for end in ("c", "ef", "gh", "hij", "l")), {"logprobs": 1}],
    ids=str,
)
def test_outputs_are_those_of_single_tokens(guessing, params):
    one_by_one = Steps()
    for steps in (one_by_one, guessing):
        steps.add("a", **params)
    (expected,), (found,) = one_by_one.drain(), guessing.drain()
    assert found.completions == expected.completions
    assert guessing.num_steps < one_by_one.num_steps
    assert guessing.collector.num_generated_tokens == one_by_one.collector.num_generated_tokens


def test_a_stop_string_outweighs_a_stop_id_that_comes_later_in_the_same_step(guessing):
    guessing.add("a", stop="e", stop_token_ids=[TEXT[5]])
    (output,) = guessing.drain()
    (completion,) = output.completions
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("abcd", "stop", "e")
    assert list(completion.token_ids) == TEXT[:5]


def test_streams_show_all_that_a_step_brought(guessing):
    guessing.add("a", stream=True)
    texts = [output.text for output in guessing.drain()]
    assert texts[-1] == "abcdefghijkl"
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert max(len(later) - len(text) for text, later in itertools.pairwise(texts)) == 3


def test_each_of_several_tokens_has_its_part_of_the_time(guessing, monkeypatch):
    now = iter(range(1, 100))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(now) * 10**9)
    for name in ("a", "b", "c"):  # of few rows each is looked at by itself
        guessing.add(name)
    guessing.drain()
    gaps = guessing.collector.metrics.histograms()["inter_token_latency_seconds"]
    assert gaps.count == 3 * 11
    assert gaps.sum == pytest.approx(3 * (guessing.num_steps - 1))


def test_runs_that_were_not_guessed_are_taken_too():
    """What a program of several steps would give: a line of tokens a row."""
    steps = Steps()
    groups = [steps.add(name, stop_token_ids=[TEXT[2]] if name == "b" else []) for name in ("a", "b", "c")]
    plan = steps.scheduler.plan()
    assert isinstance(plan, StepPlan)
    for group in groups:
        group.seqs[0].num_tokens += 3
    others = [token + 20 for token in TEXT[:4]]
    results = steps.scheduler.update(plan, [others, TEXT[:4], others])
    assert results == ([others, TEXT[:3], others], [1], {1})
    assert [group.seqs[0].output_token_ids for group in groups] == [others, TEXT[:3], others]
    assert [group.seqs[0].num_pending for group in groups] == [0, 0, 0]

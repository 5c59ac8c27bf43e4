"""Which answers a request is given, in which order, and what is said of them."""

import pytest

from jpaged.beam_search import BeamSearch
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.output_builder import OutputBuilder
from jpaged.request import FinishReason, Request, SamplingParams, TokenLogprobs
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")
PROMPT = (1, 4, 9)
EOS = 2


def make_group(num_seqs: int = 1, **params) -> SequenceGroup:
    request = Request(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(**params))
    group = SequenceGroup(request)
    for index in range(1, num_seqs):
        group.seqs.append(Sequence(group, index, tokens=list(PROMPT)))
    return group


def make_builder(group: SequenceGroup, tokenizer: Tokenizer | None = TOKENIZER) -> OutputBuilder:
    return OutputBuilder(group, "the prompt", tokenizer)


def say(builder: OutputBuilder, seq: Sequence, text: str, logprob: float | None = None) -> None:
    for token in TOKENIZER.encode(text):
        seq.append(token)
        entry = None if logprob is None else TokenLogprobs(token, logprob)
        assert builder.add_token(seq, token, entry, ends=False) is None


def end(builder: OutputBuilder, group: SequenceGroup, reason: FinishReason = "length") -> None:
    for seq in group.seqs:
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
        builder.finish(seq)
    group.status = SequenceStatus.FINISHED


def test_one_answer_and_what_is_said_of_the_request():
    group = make_group(stop=["ab!"])
    builder = make_builder(group)
    group.seqs[0].num_cached_tokens, group.num_preemptions = 2, 3
    say(builder, group.seqs[0], "xab")
    output = builder.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "the prompt", PROMPT)
    assert (output.text, output.finished, output.finish_reason, output.error) == ("x", False, None, None)
    assert (output.num_cached_tokens, output.num_preemptions) == (2, 3)
    assert output.token_ids == tuple(TOKENIZER.encode("xab"))
    end(builder, group)
    output = builder.output()
    assert (output.text, output.finished, output.finish_reason) == ("xab", True, "length")
    assert output.completions == (output.completions[0],)
    assert (output.token_ids, output.logprobs, output.stop_reason) == (output.completions[0].token_ids, None, None)


def test_several_answers_keep_their_order_and_their_own_text():
    group = make_group(3, n=3)
    builder = make_builder(group)
    for seq, text in zip(group.seqs, ("first", "second", "third"), strict=True):
        say(builder, seq, text)
    end(builder, group)
    output = builder.output()
    assert [completion.text for completion in output.completions] == ["first", "second", "third"]
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert output.text == "first"


def test_the_best_are_those_of_the_highest_mean_log_probability():
    group = make_group(4, n=2, best_of=4)
    builder = make_builder(group)
    # The third has the highest sum, the second the highest mean; of two equal means the earlier one goes first.
    for seq, text, logprob in zip(group.seqs, ("aa", "bbbb", "c", "dd"), (-0.5, -0.25, -0.5, -3.0), strict=True):
        say(builder, seq, text, logprob)
    end(builder, group)
    first, second = builder.output().completions
    assert ((first.text, first.index), (second.text, second.index)) == (("bbbb", 0), ("aa", 1))
    assert (first.cumulative_logprob, second.cumulative_logprob) == (-1.0, -1.0)
    assert first.logprobs is None  # nobody asked for them


def test_an_answer_without_tokens_is_the_worst():
    group = make_group(2, n=1, best_of=2)
    builder = make_builder(group)
    say(builder, group.seqs[1], "b", -9.0)
    end(builder, group)
    assert [completion.text for completion in builder.output().completions] == ["b"]


def test_prompt_log_probabilities_are_placed_by_position():
    builder = make_builder(make_group(prompt_logprobs=1))
    assert builder.output().prompt_logprobs == (None, None, None)
    old, new = TokenLogprobs(9, -7.0), TokenLogprobs(9, -2.0)
    builder.set_prompt_logprobs(2, old)
    builder.set_prompt_logprobs(2, new)  # computed again after a preemption
    assert builder.output().prompt_logprobs == (None, None, new)
    builder = make_builder(make_group())
    builder.set_prompt_logprobs(2, new)
    assert builder.output().prompt_logprobs is None


class TestBeamSearch:
    def searched(self, tokenizer: Tokenizer | None = TOKENIZER, stops=(EOS,), **params) -> OutputBuilder:
        params = {"temperature": 0.0, "n": 2, "use_beam_search": True, "max_tokens": 3, **params}
        group = make_group(2, **params)
        group.beam = BeamSearch(width=2, num_return=2, stop_token_ids=stops, max_tokens=3)
        a, b, c = TOKENIZER.encode("abc")
        group.beam.advance([[(a, -1.0), (b, -1.5)]])
        group.beam.advance([[(b, -1.0), (stops[0], -4.0)], [(stops[0], -0.1), (c, -2.0)]])
        group.beam.advance([[(c, -1.0), (a, -9.0)], [(b, -8.0), (a, -9.0)]])
        builder = make_builder(group, tokenizer)
        end(builder, group, "stop")
        return builder

    def test_the_answers_are_its_hypotheses(self):
        output = self.searched().output()
        best, second = output.completions
        assert (best.text, best.finish_reason, best.stop_reason) == ("b", "stop", None)
        assert best.token_ids == (*TOKENIZER.encode("b"), EOS)
        assert (best.cumulative_logprob, best.score) == (-1.6, -0.8)
        assert (second.text, second.finish_reason, second.index) == ("abc", "length", 1)
        assert (second.cumulative_logprob, second.score) == (-3.0, -1.0)
        assert (output.finished, output.finish_reason, output.error) == (True, "stop", None)

    def test_the_end_token_shows_only_if_asked_for(self):
        for include, skip, text in ((True, False, "b<|im_end|>"), (True, True, "b"), (False, False, "b")):
            builder = self.searched(include_stop_str_in_output=include, skip_special_tokens=skip)
            assert builder.output().text == text

    def test_a_stop_token_of_the_request_is_named(self):
        (stop,) = TOKENIZER.encode("z")
        output = self.searched(stops=(stop,), stop_token_ids=[stop]).output()
        assert (output.text, output.stop_reason) == ("b", stop)

    def test_an_id_that_pads_the_vocabulary_has_no_text(self):
        builder = self.searched(stops=(TOKENIZER.vocab_size + 7,), include_stop_str_in_output=True)
        assert [completion.text for completion in builder.output().completions] == ["b", "abc"]

    def test_without_a_tokenizer_there_is_no_text(self):
        assert [completion.text for completion in self.searched(tokenizer=None).output().completions] == ["", ""]

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_a_search_that_did_not_end_has_no_answers(self, reason):
        group = make_group(n=2, use_beam_search=True, temperature=0.0)
        group.beam = BeamSearch(width=2, num_return=2, stop_token_ids=(), max_tokens=3)
        group.beam.advance([[(5, -1.0), (6, -2.0)]])
        builder = make_builder(group)
        end(builder, group, reason)
        output = builder.output()
        assert (output.text, output.token_ids, output.finish_reason) == ("", (), reason)
        assert len(output.completions) == 1

    def test_beams_that_are_dropped_leave_nothing_behind(self):
        builder = self.searched()
        assert builder._builders == {}

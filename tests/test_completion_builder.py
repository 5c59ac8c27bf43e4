"""Text is given out as soon as no stop string can begin in it any more, and never taken back."""

import itertools
import math

import hypothesis.strategies as st
from hypothesis import given

from jpaged.completion_builder import CompletionBuilder
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.request import Request, SamplingParams, TokenLogprobs
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")
EOS = 2


def make_builder(**params) -> tuple[CompletionBuilder, Sequence]:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(**params))
    (seq,) = SequenceGroup(request).seqs
    return CompletionBuilder(seq, TOKENIZER), seq


def build(text: str, **params) -> tuple[CompletionBuilder, Sequence, list[str], str | None]:
    """Feeds a text byte by byte, as the engine does; gives what was visible after each token, and the stop string."""
    builder, seq = make_builder(**params)
    seen, stop = [], None
    for byte in text.encode():
        token = TOKENIZER.token_to_id(_spelling(byte))
        seq.tokens.append(token)
        stop = builder.add_token(token, None, ends=False)
        seen.append(builder.completion(0).text)
        if stop is not None:
            seq.finish_reason, seq.stop_reason = "stop", stop
            break
    seq.finish_reason = seq.finish_reason or "length"
    builder.finish()
    seen.append(builder.completion(0).text)
    return builder, seq, seen, stop


def _spelling(byte: int) -> str:
    from tests.tiny_vocabs import byte_alphabet

    return byte_alphabet()[byte]


@given(
    text=st.text(alphabet="abcé", max_size=12),
    stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_visible_text_only_grows_and_ends_at_the_first_stop(text, stops, include):
    _, seq, seen, _ = build(text, stop=stops, include_stop_str_in_output=include)
    for before, after in itertools.pairwise(seen):
        assert after.startswith(before)
    # The first stop string to be complete wins; of those complete at once, the one that begins first.
    expected, reason = text, None
    for end in range(1, len(text) + 1):
        complete = [(text[:end].index(stop), -len(stop), stop) for stop in stops if stop in text[:end]]
        if complete:
            at, _, reason = min(complete)
            expected = text[: at + len(reason)] if include else text[:at]
            break
    assert seen[-1] == expected
    assert seq.stop_reason == reason


@given(
    text=st.text(alphabet="abé€", max_size=12),
    cuts=st.sets(st.integers(0, 36)),
    include=st.booleans(),
    reason=st.sampled_from(["stop", "length", "abort"]),
)
def test_text_made_at_the_end_is_text_made_token_by_token(text, cuts, include, reason):
    """Whoever looks in between, by deltas or whole."""
    options = {"include_stop_str_in_output": include, "skip_special_tokens": False}
    token_ids = [*TOKENIZER.encode(text), TOKENIZER.vocab_size + 5, EOS]
    fed, fed_seq = make_builder(**options)
    lazy, seq = make_builder(**options)
    streamed, deltas = make_builder(**options), []
    for at, token in enumerate(token_ids):
        last = at == len(token_ids) - 1
        for sequence in (fed_seq, seq, streamed[1]):
            sequence.append(token)
            sequence.finish_reason = reason if last else None
        fed.add_token(token, None, ends=last and reason == "stop")
        if at in cuts:
            assert lazy.completion(0) == fed.completion(0)
            deltas.append(streamed[0].delta(0))
    for builder in (fed, lazy, streamed[0]):
        builder.finish()
    deltas.append(streamed[0].delta(0))
    assert lazy.completion(0) == fed.completion(0)
    given = [delta for delta in deltas if delta is not None]
    assert "".join(delta.text for delta in given) == fed.completion(0).text
    assert [token for delta in given for token in delta.token_ids] == token_ids


def test_a_tail_that_could_become_a_stop_string_is_held_back():
    _, _, seen, stop = build("xENDy", stop=["ENDz"])
    assert seen == ["x", "x", "x", "x", "xENDy", "xENDy"]
    assert stop is None


def test_half_a_character_is_held_back_until_the_end():
    builder, seq = make_builder()
    builder.add_token(TOKENIZER.token_to_id(_spelling("é".encode()[0])), None, ends=False)
    assert builder.completion(0).text == ""
    seq.finish_reason = "length"
    builder.finish()
    assert builder.completion(0).text == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_wait_for_min_tokens():
    _, _, seen, stop = build("aaab", stop=["a"], min_tokens=3, max_tokens=9)
    assert stop is None
    assert seen[-1] == "aaab"
    assert build("aaaba", stop=["a"], min_tokens=3, max_tokens=9)[2][-1] == "aaab"


def test_the_end_token_shows_only_if_asked_for():
    for include, skip, expected in ((False, False, ""), (True, False, "<|im_end|>"), (True, True, "")):
        builder, seq = make_builder(include_stop_str_in_output=include, skip_special_tokens=skip)
        seq.tokens.append(EOS)
        seq.finish_reason = "stop"
        builder.add_token(EOS, None, ends=True)
        builder.finish()
        completion = builder.completion(0)
        assert completion.text == expected
        assert completion.token_ids == (EOS,)


def test_an_id_without_a_token_has_no_text():
    builder, _ = make_builder()
    assert builder.add_token(TOKENIZER.vocab_size + 5, None, ends=False) is None
    assert builder.completion(0).text == ""


def test_log_probabilities_are_kept_where_asked_for_and_summed_where_known():
    for asked, kept in ((0, True), (None, False)):  # `best_of` needs them though nobody asked
        builder, seq = make_builder(logprobs=asked)
        assert (builder.mean_logprob, builder.completion(0).cumulative_logprob) == (-math.inf, None)
        entries = [TokenLogprobs(5, -0.5), TokenLogprobs(6, -2.0)]
        for entry in entries:
            seq.tokens.append(entry.token_id)
            builder.add_token(entry.token_id, entry, ends=False)
        completion = builder.completion(3)
        assert (builder.mean_logprob, completion.cumulative_logprob) == (-1.25, -2.5)
        assert completion.logprobs == (tuple(entries) if kept else None)
        assert (completion.index, completion.token_ids, completion.score) == (3, (5, 6), None)
        builder.add_token(7, None, ends=False)  # one that is not known leaves the sum unknown
        builder.add_token(8, entries[0], ends=False)
        assert (builder.mean_logprob, builder.completion(0).cumulative_logprob) == (-math.inf, None)

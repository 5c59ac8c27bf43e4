"""How long sequences may get, and what can never be served."""

import itertools

import pytest

from jpaged.errors import ConfigError, PromptTooLongError, RequestError
from jpaged.limits import Limits
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request, SamplingParams
from jpaged.sequence import SequenceGroup
from tests.memory_driver import end, new_seq, run

SIZE = 4


def make(num_pages: int, *, max_model_len: int = 64, max_num_seqs: int = 4, chunk: int = 8, window: int | None = None):
    memory = MemoryManager.for_pool(num_pages, SIZE, sliding_window=window)
    return memory, Limits(memory, max_model_len=max_model_len, max_num_seqs=max_num_seqs, chunk=chunk)


def ask(num_prompt: int, max_tokens: int | None = 1, **params) -> Request:
    params = SamplingParams(**{"max_tokens": max_tokens, **params})
    return Request(request_id="a", prompt_token_ids=tuple(range(num_prompt)), params=params)


@pytest.mark.parametrize(
    ("num_pages", "request_", "match"),
    [
        (40, ask(0), "request 'a' has an empty prompt, expected at least one token"),
        (40, ask(4, n=5), r"asks for 5 sequences \(n, best_of\), expected at most max_num_seqs \(4\)"),
        (40, ask(4, n=2, best_of=5), "asks for 5 sequences"),
        (40, ask(64), "prompt of 64 tokens, expected at most 63: .* the context limit, max_model_len, of 64 tokens"),
        (40, ask(65, 0, prompt_logprobs=0), "prompt of 65 tokens, expected at most 64"),
        (40, ask(60, 5), "asks for 60 prompt and 5 output tokens, which exceeds the context limit.* to 4 or pass None"),
        (40, ask(60, None, min_tokens=5), "has 60 prompt tokens and min_tokens 5, .*lower min_tokens to 4"),
        (11, ask(40), r"prompt of 40 tokens, expected at most 39: .* the page pool of 40 tokens \(10 pages\)"),
        (11, ask(30, 11), r"30 prompt and 11 output tokens, which exceeds the page pool .*lower max_tokens to 10"),
        (11, ask(8, 13, n=4), r"8 prompt and 13 output tokens, which exceeds the page pool .*lower max_tokens to 8"),
        (11, ask(37, n=2), "prompt of 37 tokens, expected at most 35"),
    ],
)
def test_refuses(num_pages, request_, match):
    with pytest.raises(RequestError, match=match):
        make(num_pages)[1].require_fits(request_)


@pytest.mark.parametrize(
    ("num_pages", "request_", "num_tokens", "pages"),
    [
        (40, ask(63), 64, 16),
        (40, ask(64, 0, prompt_logprobs=0), 64, 16),
        (40, ask(60, 4), 64, 16),
        (40, ask(8, None), 64, 16),
        (11, ask(39), 40, 10),
        (11, ask(8, None), 40, 10),
        (11, ask(8, 8, n=4), 16, 10),  # two pages of the prompt are shared, two are each one's own
        (11, ask(9, None, n=4), 16, 10),
        (11, ask(9, None, n=2, best_of=3), 16, 8),
        (11, ask(36, 4, n=1), 40, 10),
    ],
)
def test_takes_what_just_fits(num_pages, request_, num_tokens, pages):
    _, limits = make(num_pages)
    limits.require_fits(request_)
    assert (limits.num_tokens(request_), limits.num_pages(request_)) == (num_tokens, pages)


def test_what_is_taken_fits_and_what_is_refused_does_not():
    for num_pages, prompt, output, n, window in itertools.product(
        (3, 6, 11), (1, 4, 7, 12), (1, 5, 20), (1, 2, 4), (None, 3, 9)
    ):
        memory, limits = make(num_pages, window=window, chunk=3)
        request = ask(prompt, output, n=n)
        needed = limits.num_pages(request)
        try:
            limits.require_fits(request)
        except PromptTooLongError:
            assert needed > memory.capacity
        else:
            assert needed <= memory.capacity
            assert limits.num_tokens(request) == prompt + output
        limit = limits.num_tokens(ask(prompt, None, n=n))
        if limit > prompt:  # "whatever fits" fits, and not a page more would
            assert limits.num_pages(request, limit) <= memory.capacity
            assert limit == 64 or limits.num_pages(request, limit + SIZE) > memory.capacity


def test_a_window_lets_sequences_outgrow_the_pool():
    _, limits = make(9, window=8)
    assert limits.num_tokens(ask(8, None)) == 64
    assert limits.num_pages(ask(8, None)) == 5
    assert limits.num_tokens(ask(8, None, n=2)) == 16  # two windows and a chunk do not fit at once
    limits.require_fits(ask(60, 4))


def test_context_needs_room_for_a_prompt_and_an_output_token():
    with pytest.raises(ConfigError, match="max_model_len is 1, expected at least 2"):
        make(9, max_model_len=1)


def pin_prefix(memory: MemoryManager, tokens) -> None:
    memory.promise_pin("prefix", len(tokens))
    seq = run(memory, tokens)
    memory.pin("prefix", seq)
    end(memory, seq)


def test_pinned_pages_are_for_those_who_share_them():
    memory, limits = make(11)
    pin_prefix(memory, range(24))
    limits.require_fits(ask(30, 10))  # begins with it
    assert limits.num_tokens(ask(30, None)) == 40
    other = new_seq(range(50, 66)).request
    with pytest.raises(
        PromptTooLongError, match=r"at most 15: .* page pool of 16 tokens \(4 pages; 6 more are pinned\)"
    ):
        limits.require_fits(other)
    memory.pins.unpin("prefix")
    limits.require_fits(other)


@pytest.mark.parametrize("window", [None, 8])
def test_whatever_shares_a_pinned_prefix_keeps_to_it(window):
    memory, limits = make(11, window=window)
    pin_prefix(memory, range(24))
    limit = limits.num_tokens(ask(30, None))
    assert limit == (40 if window is None else 16)  # a window moves on from the pinned pages


def test_a_pin_must_not_be_in_the_way_of_what_was_taken():
    memory, limits = make(11)
    served = SequenceGroup(ask(20, 8), limit=28)
    limits.require_pin(ask(12, 0, prompt_logprobs=0), [served])
    with pytest.raises(RequestError, match=r"is to pin 4 of 10 pages, but request 'a', .* may need 7; wait"):
        limits.require_pin(ask(13, 0, prompt_logprobs=0), [served])
    memory.promise_pin("other", 4)
    with pytest.raises(RequestError, match="is to pin 3 of 9 pages"):
        limits.require_pin(ask(12, 0, prompt_logprobs=0), [served])


def test_a_pin_needs_a_prefix_cache():
    memory = MemoryManager.for_pool(11, SIZE, prefix_cache=False)
    limits = Limits(memory, max_model_len=64, max_num_seqs=4, chunk=8)
    with pytest.raises(RequestError, match=r"there is no prefix cache \(CacheConfig.prefix_cache\)"):
        limits.require_pin(ask(8), [])

"""A match is the longest one, and of those the latest, however the tokens came."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jpaged.prompt_lookup import MAX_PLACES, PromptLookup, tokens_from

TOKENS = st.integers(0, 3)


def match(tokens: list[int], shortest: int, longest: int) -> int:
    """Where the token stands that came after the last ones before, by looking everywhere."""
    count = len(tokens)
    places = [
        end for end in range(shortest, count) if tokens[end - shortest : end] == tokens[max(count - shortest, 0) :]
    ]

    def agree(end: int) -> int:
        same = 0
        while same < min(longest, end) and tokens[end - 1 - same] == tokens[count - 1 - same]:
            same += 1
        return same

    return max(places[-MAX_PLACES:], key=lambda end: (agree(end), end), default=0)


class LookupMachine(RuleBasedStateMachine):
    """Tokens come a few at a time or many at once."""

    @initialize(shortest=st.integers(1, 3), more=st.integers(0, 5), tokens=st.lists(TOKENS, max_size=200))
    def make(self, shortest: int, more: int, tokens: list[int]) -> None:
        self.shortest, self.longest = shortest, shortest + more
        self.lookup = PromptLookup(self.shortest, self.longest)
        self.tokens = tokens
        self.lookup.extend(tokens)

    @rule(tokens=st.lists(TOKENS, max_size=70))
    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.lookup.extend(self.tokens)

    @invariant()
    def finds_what_is_there(self) -> None:
        assert self.lookup.find(self.tokens) == match(self.tokens, self.shortest, self.longest)


TestLookupMachine = LookupMachine.TestCase
TestLookupMachine.settings = settings(max_examples=25, stateful_step_count=8, deadline=None, database=None)


def test_the_longest_match_is_preferred_to_a_later_one_and_the_latest_of_equal_ones():
    lookup = PromptLookup(2, 4)
    tokens = [1, 2, 3, 4, 9, 3, 4, 8, 7, 2, 3, 4]
    lookup.extend(tokens)
    assert lookup.find(tokens) == 4  # 2 3 4, not 3 4
    tokens = [3, 4, 9, 3, 4, 8, 7, 3, 4]
    lookup = PromptLookup(2, 4)
    lookup.extend(tokens)
    assert lookup.find(tokens) == 5


def test_equal_keys_of_unequal_tokens_are_no_match():
    lookup = PromptLookup(2, 4)
    lookup.extend([1, 2, 3, 4])
    lookup._before[4] = 2  # as if 1 2 and 3 4 had one key
    assert lookup.find([1, 2, 3, 4]) == 0


@given(st.lists(TOKENS, min_size=1, max_size=20), st.data())
def test_what_follows_repeats_itself_beyond_the_end(tokens, data):
    start = data.draw(st.integers(0, len(tokens) - 1))
    expected = tokens[:]
    while len(expected) < start + 30:
        expected.append(expected[len(expected) - (len(tokens) - start)])
    assert tokens_from(tokens, start, 30) == expected[start : start + 30]

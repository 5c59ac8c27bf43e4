"""Guesses are judged by what comes, whether they were used or not."""

import pytest

from jpaged.guesser import Guesser


def test_nothing_is_guessed_before_anything_repeats():
    guesser = Guesser(2, 4)
    guesser.follow([1, 2, 3, 1])
    assert not guesser.has_guess
    guesser.follow([1, 2, 3, 1, 2])
    assert guesser.has_guess
    assert guesser.guess([1, 2, 3, 1, 2], 4) == [3, 1, 2, 3]
    assert guesser.hit_rate == 0.5


def test_the_hit_rate_follows_what_came_true():
    guesser, tokens, rates = Guesser(2, 4), [1, 2, 3, 4, 5, 1, 2], []
    for token in (3, 4, 9, 9):
        guesser.follow(tokens)
        tokens.append(token)
        rates.append(guesser.hit_rate)
    guesser.follow(tokens)
    assert rates == pytest.approx([0.5, 0.6, 0.68, 0.544])  # two hits, a miss
    assert guesser.hit_rate == pytest.approx(0.544 * 0.8)  # and one behind it


def test_several_tokens_at_once_count_up_to_the_first_miss():
    guesser = Guesser(2, 4)
    guesser.follow([1, 2, 3, 4, 5, 1, 2])
    guesser.follow([1, 2, 3, 4, 5, 1, 2, 3, 9, 5])
    assert guesser.hit_rate == pytest.approx((0.5 + 0.2 * 0.5) * 0.8)


def test_a_guess_goes_on_where_it_was_while_it_comes_true():
    tokens = [7, 8, 1, 7, 8, 2, 5, 7, 8]
    guesser = Guesser(2, 2)
    guesser.follow(tokens)
    assert guesser.guess(tokens, 3) == [2, 5, 7]
    tokens.append(2)
    guesser.follow(tokens)
    assert guesser.guess(tokens, 2) == [5, 7]


def test_behind_a_word_in_the_place_of_another_the_text_may_go_on():
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    guesser = Guesser(2, 4)
    guesser.follow(tokens)
    tokens += [3, 9]
    guesser.follow(tokens)
    assert guesser.guess(tokens, 2) == [5, 6]
    tokens += [5, 6]
    guesser.follow(tokens)
    assert guesser.guess(tokens, 1) == [1]
    tokens += [8, 2, 3]  # a miss, and what came after it with the same step
    guesser.follow(tokens)
    assert guesser.guess(tokens, 2) == [9, 5]  # 2 3 stood before

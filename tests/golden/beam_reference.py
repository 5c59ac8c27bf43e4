"""Beam search over whole rows of log-probabilities, written to be obviously right, in numpy alone.

Two sides use it: scripts/make_beam_golden.py shows that it does what Hugging Face transformers does, step by step on
the log-probabilities that transformers computed; tests compare jpaged with it on models that transformers never saw.
"""

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

Tokens = tuple[int, ...]


@dataclass
class Search:
    """What a search found.

    Attributes:
      token_ids: the hypotheses' tokens, best first, stop tokens included.
      scores: their scores.
      num_steps: how many times the model was asked.
      margin: how near any decision was to falling otherwise, as a difference of log-probabilities.
      running: for each step, the beams that it left running, best first.
    """

    token_ids: list[Tokens]
    scores: list[float]
    num_steps: int
    margin: float
    running: list[list[Tokens]]


def beam_search(
    logprobs_after: Callable[[list[Tokens]], np.ndarray],
    *,
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
    stop_token_ids: Collection[int],
    max_tokens: int,
    min_tokens: int = 0,
) -> Search:
    """Searches from the empty output.

    Args:
      logprobs_after: of outputs, the log-probabilities [outputs, V] of the next token. Sums have its dtype.
      (others): as for `BeamSearch`.
    """
    beams, totals = [()], None
    best: list[tuple[float, int, Tokens]] = []  # (score, tokens that the score counts, output)
    found = Search([], [], 0, math.inf, [])
    stops = sorted(set(stop_token_ids))
    for length in range(1, max_tokens + 1):
        table = np.array(logprobs_after(beams))
        if length <= min_tokens:
            table[:, stops] = -np.inf
        table = table if totals is None else table + totals[:, None]
        ranked = _ranked(table, (2 + len(stops)) * width + 1)
        ends = [length == max_tokens or token in stops for _, _, token in ranked]
        divisor = length**length_penalty

        going = [c for c, end in zip(ranked, ends, strict=True) if not end]
        if len(going) > width:
            found.margin = min(found.margin, float(going[width - 1][0] - going[width][0]))
        for rank, ((total, parent, token), end) in enumerate(zip(ranked, ends, strict=True)):
            if not end:
                continue
            if rank < width:
                best.append((float(total) / divisor, length, (*beams[parent], token)))
            rival = width if rank < width else width - 1  # the first that it must stay before, or comes after
            if rival < len(ranked):
                found.margin = min(found.margin, abs(float(total - ranked[rival][0])))
        best.sort(key=lambda hypothesis: -hypothesis[0])
        _note_margins(found, best[: width + 1], length_penalty)
        best = best[:width]

        found.num_steps = length
        going = going[:width]
        beams, totals = [(*beams[parent], token) for _, parent, token in going], np.array([c[0] for c in going])
        found.running.append(beams)
        if not beams:
            break
        if len(best) == width:
            if early_stopping is True:
                break
            far = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            promise = float(totals[0]) / far**length_penalty
            found.margin = min(found.margin, abs(promise - best[-1][0]) * _unit(best[-1][1], far, length_penalty))
            if promise <= best[-1][0]:
                break
    found.scores, found.token_ids = [score for score, _, _ in best], [output for _, _, output in best]
    return found


def _ranked(table: np.ndarray, count: int) -> list[tuple[Any, int, int]]:
    """The `count` largest entries as (value, row, column), largest first; equal ones in order of rows, then columns."""
    flat = table.reshape(-1)
    near = np.arange(flat.size)
    if count < flat.size:
        near = np.flatnonzero(flat >= np.partition(flat, flat.size - count)[flat.size - count])
    order = near[np.argsort(-flat[near], kind="stable")][:count]
    columns = table.shape[1]
    return [(flat[i], int(i // columns), int(i % columns)) for i in order if flat[i] > -np.inf]


def _note_margins(found: Search, best: list[tuple[float, int, Tokens]], length_penalty: float) -> None:
    """Each hypothesis against the next one, those included that were pushed out."""
    for (score, length, _), (lower, other, _) in itertools.pairwise(best):
        found.margin = min(found.margin, (score - lower) * _unit(length, other, length_penalty))


def _unit(length: int, other: int, length_penalty: float) -> float:
    """A difference of scores times this is one of log-probabilities, or less."""
    return min(length**length_penalty, other**length_penalty)

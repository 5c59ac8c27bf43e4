"""Prompts of the bench of guessed tokens, which of them are held out, and which answers loop."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from jpaged.tokenizer import Tokenizer

PROMPTS: Final = Path(__file__).parents[1] / "data" / "speculation_prompts.json"
_MAX_PERIOD: Final = 64
_LEAST_LOOP: Final = 24

Half = Literal["chosen", "held out", "all"]


def loops(tokens: Sequence[int]) -> bool:
    """Whether a run of tokens stands three times in a row or more, 24 tokens or more in all.

    Example:
      >>> loops([1, 2, 3, 4, 5, 6, 7, 8] * 3), loops([1, 2, 3, 4, 5, 6, 7, 8] * 2), loops([5] * 23)
      (True, False, False)
    """
    values = np.asarray(tokens)
    for period in range(1, min(_MAX_PERIOD, len(values) // 3) + 1):
        least = max(3 * period, _LEAST_LOOP) - period
        same = values[period:] == values[:-period]
        ends = np.flatnonzero(np.diff(np.concatenate(([0], same, [0]))))
        if len(ends) and (ends[1::2] - ends[::2]).max() >= least:
            return True
    return False


def read_prompts(tokenizer: Tokenizer, half: Half = "all") -> dict[str, dict[str, list[int]]]:
    """Token ids by workload and name.

    Args:
      tokenizer: of the model.
      half: every second prompt: those by which constants of the rule were chosen, or the others, which are held out.
    """
    found = json.loads(PROMPTS.read_text(encoding="utf-8"))
    texts = {
        "editing": {one["name"]: f"{one['task']}\n\n{one['text']}" for one in found["editing"]},
        "others": {one["text"].split("\n")[0]: one["text"] for one in found["others"]},
    }
    first, step = {"chosen": (0, 2), "held out": (1, 2), "all": (0, 1)}[half]
    return {
        workload: {
            name: tokenizer.encode_chat([{"role": "user", "content": text}])
            for name, text in list(named.items())[first::step]
        }
        for workload, named in texts.items()
    }

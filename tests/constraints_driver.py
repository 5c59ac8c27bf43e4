"""A scheduler with constraints, and a test in the place of the model."""

import time

from jpaged.constraints import Constraints
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.token_mask import unpack_mask
from jpaged.tokenizer import Tokenizer
from tests.scheduler_driver import make_group, make_scheduler
from tests.tiny_vocabs import byte_level_metadata

SIZE, END = 300, 2
TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")


def byte(text: str) -> int:
    (token,) = TOKENIZER.encode(text)
    return token


class Run:
    """A scheduler and constraints, with a test in the place of the model."""

    def __init__(self, **options) -> None:
        self.scheduler = make_scheduler(budget=32)
        self.scheduler._eos_token_ids = frozenset([END])
        self.constraints = Constraints(TOKENIZER, SIZE, [END], **options)
        self.refused: list[str] = []

    def add(self, name="a", **options):
        group = make_group(name, 3, **{"ignore_eos": False, "max_tokens": 9, **options})
        self.scheduler.add(group)
        self.constraints.open(group)
        return group

    def poll(self) -> None:
        for group, why in self.constraints.poll():
            self.refused.append(why)
            for seq in group.live:
                self.scheduler.finish(seq, "error")

    def settle(self) -> None:
        """Until nothing is being made."""
        until = time.monotonic() + 60
        self.poll()
        while self.constraints.is_working and time.monotonic() < until:
            self.constraints.wait()
            self.poll()
        assert not self.constraints.is_working

    def step(self, *tokens: int) -> list[list[int]]:
        """One step that samples these tokens; the tokens that were allowed, row by row."""
        self.settle()
        plan = self.scheduler.plan()
        assert plan is not None
        masks = self.constraints.due(plan)
        assert [index for index, _ in masks] == [
            seq.state_index for seq, samples in zip(plan.seqs, plan.samples, strict=True) if samples
        ]
        allowed = [unpack_mask(mask) for _, mask in masks]
        self.scheduler.update(plan, list(tokens))
        self.constraints.advance(plan)
        return allowed

"""Entries and masks reach the sampler state before the step that needs them, and no others do."""

import jax
import numpy as np

from jpaged.sampler_state import make_sampler_state
from jpaged.state_loader import StateLoader
from jpaged.structured import StructuredOutput
from jpaged.token_mask import unpack_mask
from tests.constraints_driver import END, SIZE, Run, byte
from tests.plans import plan_of_rows


def made(run: Run) -> StateLoader:
    return StateLoader([END], SIZE, run.constraints)


def test_loads_what_a_plan_needs():
    run = Run()
    loader = made(run)
    form = run.add("form", structured=StructuredOutput(choice=["ab"]))
    listed = run.add("listed", allowed_token_ids=[7, 9])
    free = run.add("free")
    run.settle()
    plan = run.scheduler.plan()
    state = loader.load(make_sampler_state(4, SIZE), loader.due(plan))
    masks = np.asarray(state.token_mask)
    assert unpack_mask(masks[form.seqs[0].state_index]) == [byte("a")]
    assert unpack_mask(masks[listed.seqs[0].state_index]) == [7, 9]
    assert len(unpack_mask(masks[free.seqs[0].state_index])) >= SIZE


def test_nothing_is_due_for_most_plans():
    run = Run()
    loader = made(run)
    run.add("free")
    assert loader.due(run.scheduler.plan()) is None


def test_warming_up_empties_entry_0_only_where_it_is_nobodys():
    loader = made(Run())
    state = make_sampler_state(4, SIZE)
    state = jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf + 5, state)
    state = loader.warm_up(state, idle=False, masks=True)
    assert state.last_token.tolist() == [5] * 5
    assert loader.warm_up(state, idle=True, masks=False).last_token.tolist() == [0, 5, 5, 5, 5]


def test_clear_forgets_who_had_no_row_yet():
    run = Run()
    loader = made(run)
    run.add("a", structured=StructuredOutput(choice=["ab"]), min_tokens=1)
    run.settle()
    run.scheduler.plan()
    loader.clear()
    assert not run.constraints._states
    assert not loader._awaiting
    assert loader.due(plan_of_rows([])) is None

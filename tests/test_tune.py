"""Which sizes `scripts/tune.py` puts into a table."""

import doctest

from scripts import tune

_CELL = {"head_dim": 128, "itemsize": 2, "units": 8, "rule_us": 10.0}
ONE, TWO = {"consumers": 1, "stages": 6}, {"consumers": 2, "stages": 3}


def test_examples() -> None:
    result = doctest.testmod(tune)
    assert result.attempted > 0
    assert result.failed == 0


def test_sizes_are_chosen_by_shape_and_where_they_are_clearly_better() -> None:
    cells = [
        {**_CELL, "sizes": ONE, "us": 9.0},
        {**_CELL, "sizes": ONE, "us": 9.5},
        {**_CELL, "sizes": TWO, "us": 8.0},  # of this there is one figure alone
        {**_CELL, "units": 100, "sizes": ONE, "us": 9.9},
        {**_CELL, "head_dim": 64, "sizes": ONE, "us": 5.0},
    ]
    assert tune.choices("decode", cells) == [
        {"head_dim": 64, "itemsize": 2, "min_units": 0, "end_units": 16, "sizes": ONE, "gain": 2.0},
        {"head_dim": 128, "itemsize": 2, "min_units": 0, "end_units": 16, "sizes": ONE, "gain": 1.081},
    ]


def test_the_rules_are_among_what_is_measured() -> None:
    jobs = tune.make_jobs(["prefill"], [128], ["int8"])
    assert {kernel for kernel, *_ in jobs} == {"prefill"}
    assert sum(sizes == {} for *_, sizes in jobs) == len(tune.PREFILL_CELLS)
    for model in tune.DECODE_MODELS:
        for rows in tune.DECODE_STEPS:
            rule = tune.rule_gpu_blocks(model.head_dim, 132, model.itemsize, units=rows * model.kv_heads)
            assert rule.consumers in tune.decode_consumers(model)

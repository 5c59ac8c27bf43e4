"""Which sizes `scripts/tune.py` puts into a table."""

import doctest
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged.pallas_kernels.compat import GPU
from jpaged.pallas_kernels.tuned_blocks import FIELDS, read_table
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


KIND = "NVIDIA H1"  # there is none


def record_of(**cells: list[dict[str, Any]]) -> dict[str, Any]:
    """As `main` makes it, of measurements by kernel."""
    chosen = {kernel: tune.choices(kernel, cells.get(kernel, [])) for kernel in FIELDS}
    return {"script": "tune", "device": KIND, "results": {"chosen": chosen, **cells}}


def won(model: tune.Model, sizes: dict[str, int], units: int = 0) -> dict[str, Any]:
    """The measurement of sizes that are faster than the rules'."""
    shape = {"head_dim": model.head_dim, "itemsize": model.itemsize, "units": units}
    return {**shape, "sizes": sizes, "us": 5.0, "rule_us": 10.0}


def test_whatever_sizes_win_the_table_is_read_again(tmp_path: Path) -> None:
    cells = [
        ("decode", won(model, {"consumers": n, "stages": tune._stages(model, n), "full_share": share}, rows))
        for model, share, rows in itertools.product(tune.DECODE_MODELS, tune.SHARES, tune.DECODE_STEPS)
        for n in tune.decode_consumers(model)
    ]
    for model in tune.PREFILL_MODELS:
        cells += [("prefill", won(model, sizes)) for sizes in tune.prefill_sizes(model) if sizes]
    for number, (kernel, cell) in enumerate(cells):
        path = tune.write_table(record_of(**{kernel: [cell]}), KIND, tmp_path / f"{number}")
        (choice,) = read_table(KIND, path.parent)[kernel]
        assert (choice.head_dim, choice.itemsize, choice.sizes) == (cell["head_dim"], cell["itemsize"], cell["sizes"])
        assert choice.min_units <= cell["units"] < choice.end_units


def test_a_table_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    record = record_of(decode=[won(tune.DECODE_MODELS[0], {"stages": 9})])
    with pytest.raises(ValueError, match="decode: stages is 9; expected an integer from 2 to 8"):
        tune.write_table(record, KIND, tmp_path)
    with pytest.raises(ValueError, match="a table of the device 'NVIDIA H1'; expected 'NVIDIA H200'"):
        tune.write_table(record_of(), "NVIDIA H200", tmp_path)
    assert list(tmp_path.iterdir()) == []


def run_main(words: str, cells: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune.main` on a GPU of `KIND` that measures this of decode steps; jax's first device is another, the CPU."""
    monkeypatch.setattr(sys, "argv", ["tune.py", *words.split()])
    monkeypatch.setattr("jpaged.pallas_kernels.compat.current_gpu", lambda: GPU(KIND, "9.0", 132))
    monkeypatch.setattr(tune, "collect", lambda jobs, multiprocessors: {"decode": cells, "prefill": []})
    monkeypatch.setattr(tune, "FOLDER", folder)
    tune.main()


GOOD, BAD = ([won(tune.DECODE_MODELS[0], {"stages": n})] for n in (4, 9))


@pytest.mark.parametrize("words", ["--write", ""])
def test_a_record_is_of_the_gpu_that_was_measured_and_the_last_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(words, GOOD, tmp_path, monkeypatch)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["device"], record["results"]["decode"]) == (KIND, GOOD)
    files = list(tmp_path.iterdir())
    assert [json.loads(path.read_text()) for path in files] == ([record] if words else [])
    (choice, *_) = [*read_table(KIND, tmp_path)["decode"], None]
    assert (None if choice is None else choice.sizes) == ({"stages": 4} if words else None)


@pytest.mark.parametrize(
    ("words", "cells", "folder", "why"),
    [
        ("--write", GOOD, "none/tuned", "No such file or directory"),
        ("--write", BAD, "", "decode: stages is 9; expected an integer from 2 to 8"),
        ("", BAD, "", "decode: stages is 9; expected an integer from 2 to 8"),
    ],
)
def test_what_was_measured_is_told_even_where_no_table_can_be_made_of_it(
    words: str,
    cells: list[dict[str, Any]],
    folder: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=f"^error: no table was made of the record above: .*{why}"):
        run_main(words, cells, tmp_path / folder, monkeypatch)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["device"], record["results"]["decode"]) == (KIND, cells)
    assert list(tmp_path.iterdir()) == []

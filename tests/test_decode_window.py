"""What a decode cell is timed by: steps in which all rows decode, neither admission nor ends, by a clock of its own."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.collector import Collector
from scripts.engine import measures, serve
from scripts.engine.bench import run_decode
from scripts.engine.measures import Bench, Look, decode_window
from scripts.engine.peers import Yardstick
from scripts.engine.results import Results
from scripts.engine.roofline import ModelCost, Roofs
from scripts.engine.serve import Run
from tests.engine_driver import make_engine
from tests.fakes import tiny_llama

ROWS, CONTEXT = 6, 16
ADMITTING_S, STEP_S, SMALLER_STEP_S, ENDING_S = 100.0, 1.0, 0.25, 50.0


@dataclass
class Clock:
    """Seconds that pass while results are read, and what was read."""

    now: float = 0.0
    reads: list[tuple[int, int]] = field(default_factory=list)  # rows, and the tokens that they got


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The benchmark's clock: a step that has a prompt is slow, one of fewer rows is fast, and each end is slow."""
    clock, collect, close = Clock(), Collector.collect, Collector._close

    def collect_slowly(collector, done, token_ids):
        plan, before = done.plan, collector.num_generated_tokens
        decodes, all_decode = plan.num_tokens == plan.num_seqs, plan.num_seqs == ROWS
        clock.now += plan.num_steps * ((STEP_S if all_decode else SMALLER_STEP_S) if decodes else ADMITTING_S)
        outputs = collect(collector, done, token_ids)
        clock.reads.append((plan.num_seqs, collector.num_generated_tokens - before))
        return outputs

    def close_slowly(*args):
        clock.now += ENDING_S
        return close(*args)

    monkeypatch.setattr(Collector, "collect", collect_slowly)
    monkeypatch.setattr(Collector, "_close", close_slowly)
    for module in (measures, serve):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def make_bench(scale: float, seqs: int = ROWS, **options) -> Bench:
    """Its roofline is a ms for each token that a step reads. Prompts are computed anew, a few in a step."""
    cache = {"prefix_cache": False}
    sizes = {"seqs": seqs, "budget": 40, "length": 256, "num_pages": 256, **options}
    engine = make_engine(tiny_llama(), cache=cache, **sizes)
    return Bench(
        engine=engine,
        num_layers=2,
        cost=ModelCost(weight_bytes=0, token_flops=0, row_flops=0, kv_token_bytes=1.0, pair_flops=0),
        roofs=Roofs(read=1e3, matmul=1.0),
        yardstick=Yardstick.of("tiny", "cpu", "float32", 1.0),
        repeats=1,
        scale=scale,
    )


def measure(scale: float, **options) -> dict[str, Any]:
    (cell,) = measures.measure_decode(make_bench(scale, **options), [(ROWS, CONTEXT)])
    return cell


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize(("decode_steps", "timed", "output"), [(1, 10, 6.5), (4, 8, 5.5)])
def test_neither_admission_nor_steps_of_fewer_rows_nor_ends_are_in_a_decode_step(
    decode_steps: int, timed: int, output: float, run_ahead: bool, clock: Clock
) -> None:
    cell = measure(0.1, decode_steps=decode_steps, run_ahead=run_ahead)
    # After two of the three steps that admit, there are as many tokens as rows, and two rows have none.
    begin = max(index for index, read in enumerate(clock.reads) if read == (3, 2))
    assert clock.reads[begin : begin + 3] == [(3, 2), (5, 4), (6, 6)]
    assert clock.reads[-1] == (2, 2), "those that were admitted last end last"
    assert (cell["ms"], cell["timed_steps"]) == (1e3 * STEP_S, timed)
    # The rows have 3, 3, 2, 2, 1 and 1 tokens when it begins, 2 on average, and one more with each step.
    assert cell["roofline_ms"] == ROWS * (CONTEXT + output)
    assert output == 2 + (timed - 1) / 2


@pytest.mark.parametrize(
    ("steps", "options", "seconds", "timed"),
    [
        (4, {}, STEP_S, 1),
        # The first rows end with the next results: to the end, which has smaller steps and all ends.
        (3, {}, STEP_S + 2 * SMALLER_STEP_S + ROWS * ENDING_S, 2),
        (4, {"decode_steps": 4}, 4 * STEP_S + ROWS * ENDING_S, 3),
        # The first rows end when the last ones get a token, or before: the whole run.
        (2, {}, 3 * ADMITTING_S + 2 * SMALLER_STEP_S + ROWS * ENDING_S, 3),
        (4, {"seqs": 3}, 4 * ADMITTING_S + 8 * SMALLER_STEP_S + ROWS * ENDING_S, 5),
    ],
    ids=str,
)
def test_where_all_rows_decode_in_no_step_a_cell_is_timed_to_the_end_or_from_the_beginning(
    steps: int, options: dict[str, int], seconds: float, timed: int, clock: Clock
) -> None:
    cell = measure(steps / 128, **options)
    assert (cell["ms"], cell["timed_steps"]) == (round(1e3 * seconds / timed, 3), timed)


@pytest.mark.parametrize(
    ("steps", "said"), [(12, ", over 9.0 of 12 steps, "), (2, ", over a whole run with admission and ends, ")]
)
def test_what_was_timed_is_said(steps: int, said: str, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run_decode(make_bench(steps / 128), Results(None, quiet=False), [(ROWS, CONTEXT)], [], lambda: False)
    assert said in capsys.readouterr().out


def test_both_ends_are_right_after_results_were_read() -> None:
    before = make_engine(tiny_llama()).stats()
    seen = [(1.0, 0, 0), (2.0, 2, 0), (3.0, 5, 0), (4.0, 8, 0), (5.0, 8, 0), (6.0, 11, 2), (7.0, 12, 3)]
    looks = [
        Look(at_s, replace(before, num_generated_tokens=tokens, num_finished=finished))
        for at_s, tokens, finished in seen
    ]
    window = decode_window(Run(8.0, 12, before, looks[-1].stats), looks, 3)
    assert (window.wall_s, window.output_tokens) == (4.0 - 3.0, 3), "nothing was read at 5.0"
    assert (window.before, window.after) == (looks[2].stats, looks[3].stats)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_it_ends_before_a_row_loses_its_pages(decode_steps: int, clock: Clock) -> None:
    cell = measure(0.5, num_pages=40, decode_steps=decode_steps)
    assert any(rows < ROWS for rows, _ in clock.reads)
    assert cell["ms"] == 1e3 * STEP_S
    assert 25 < cell["timed_steps"] < 32

"""What a plan says of its compiled steps."""

import pytest

from jpaged.accelerators import parse_topology
from jpaged.model_shapes import model_shape
from jpaged.serving_plan import Wishes, plan_serving
from scripts.plan_text import plan_text

TOKENS = "tokens 1 8 32 64 128 160 192 224 256 512 1024 2048 4096"


@pytest.mark.parametrize(
    ("model", "topology", "rows", "line"),
    [
        (
            "smollm2-135m",
            "h200",
            256,
            f"24: {TOKENS}; that of 2048 for 64 rows too; that of 4096 for 64 rows too; 4 decode steps at once for "
            "1 8 32 64 128 160 192 224 256 rows; pages a row 512",
        ),
        (
            "Llama-3.1-8B",
            "h200",
            256,
            f"30: {TOKENS}; that of 2048 for 64 rows too; that of 4096 for 64 rows too; pages a row 1024 8192",
        ),
        (
            "Llama-3.1-8B",
            "h200",
            512,
            "34: tokens 1 8 32 64 128 160 192 224 256 384 512 1024 2048 4096; that of 2048 for 64 256 rows too; that "
            "of 4096 for 64 rows too; pages a row 1024 8192",
        ),
        ("Llama-3.1-8B", "v6e-1", 64, "6: tokens 8 32 64 256 1024 2048; pages a row 1858"),
    ],
)
def test_shapes_are_named_by_whose_number_they_are_counted(model, topology, rows, line):
    plan = plan_serving(model, model_shape(model), parse_topology(topology), Wishes(max_num_seqs=rows))
    text = plan_text(plan)
    (told,) = (part for part in text.splitlines() if part.startswith("  compiled steps"))
    assert told.split(None, 2)[2] == line
    named, pages = line.partition(": ")[2].split("; pages a row ")
    counts = [len([word for word in part.split(" for ")[-1].split() if word.isdecimal()]) for part in named.split("; ")]
    assert sum(counts) * len(pages.split()) == len(plan.chosen.step_shapes) == int(line.partition(":")[0])
    assert f"{len(plan.chosen.step_shapes)} compiled steps; an estimate" in text


def test_the_budget_of_prompts_is_told_where_there_is_one():
    def told(topology: str, begin: str, **wishes) -> str:
        plan = plan_serving("m", model_shape("Llama-3.1-8B"), parse_topology(topology), Wishes(**wishes))
        (line,) = (part for part in plan_text(plan).splitlines() if part.lstrip().startswith(begin))
        return line

    ordinary = "2,048 tokens a step (--max-num-batched-tokens)"
    assert told("h200", "at once").endswith(f"{ordinary}, 4,096 of prompts alone (--max-num-prefill-tokens)")
    assert told("h200", "at once", max_num_batched_tokens=2048).endswith(ordinary)
    assert told("v6e-1", "at once").endswith(ordinary)
    assert "4,096 tokens, page table" in told("h200", "step's inputs")
    assert "2,048 tokens, page table" in told("v6e-1", "step's inputs")

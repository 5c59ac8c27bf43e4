"""Tables of block sizes: read once, checked, and used where the GPU in use has one."""

import itertools
import json
from pathlib import Path

import pytest

from jpaged.pallas_kernels.prefill_tuning_gpu import choose_prefill_blocks, rule_prefill_blocks
from jpaged.pallas_kernels.tuned_blocks import read_table, table_name, tuned
from jpaged.pallas_kernels.tuning import NARROW_ROWS, TILE_ROWS, choose_gpu_blocks, fit_stages, rule_gpu_blocks
from tests.kernels.test_dispatch import gpu_mesh

KIND = "NVIDIA H200"
CHOICE = {"head_dim": 128, "itemsize": 2, "min_units": 16, "end_units": 64, "sizes": {"consumers": 1, "stages": 6}}


def write(folder: Path, device: str = KIND, **chosen) -> None:
    record = {"device": device, "results": {"chosen": {"decode": [], "prefill": [], **chosen}}}
    (folder / table_name(KIND)).write_text(json.dumps(record), encoding="utf-8")


def test_a_table_is_used_on_its_gpu_and_for_its_shapes(tmp_path: Path) -> None:
    write(tmp_path, decode=[CHOICE])
    rule = rule_gpu_blocks(128, 132)

    def chosen(units: int, head_dim: int = 128) -> tuple[int, int]:
        blocks = tuned("decode", rule, head_dim=head_dim, itemsize=2, units=units, folder=tmp_path)
        return blocks.consumers, blocks.stages

    with jax_mesh(KIND):
        assert [chosen(units) for units in (15, 16, 63, 64)] == [(2, 3), (1, 6), (1, 6), (2, 3)]
        assert chosen(16, head_dim=64) == (2, 3)
    with jax_mesh("NVIDIA H100 80GB HBM3"):
        assert chosen(16) == (2, 3)
    assert chosen(16) == (2, 3)  # no GPU at all


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2)])
def test_what_the_table_of_the_h200_has_fits_whatever_the_query_heads(
    head_dim: int, itemsize: int, page_size: int
) -> None:
    with jax_mesh(KIND):
        for group, units in itertools.product(range(1, TILE_ROWS + 1), (1, 64, 256, 2048)):
            blocks = choose_gpu_blocks(head_dim, 132, itemsize, page_size, units=units, group=group)
            rows = -(-group // NARROW_ROWS) * NARROW_ROWS if itemsize == 1 else TILE_ROWS
            fitting = fit_stages(head_dim, itemsize, page_size, blocks.consumers, rows, swapped=itemsize == 1)
            assert 2 <= blocks.stages <= fitting


def test_the_rules_hold_where_a_choice_does_not_fit() -> None:
    with jax_mesh(KIND):
        few, many = (choose_gpu_blocks(128, 132, 1, units=64, group=group) for group in (4, 64))
        assert few != rule_gpu_blocks(128, 132, 1, units=64, group=4)
        assert many == rule_gpu_blocks(128, 132, 1, units=64, group=64)


def jax_mesh(kind: str):
    import jax

    return jax.sharding.use_abstract_mesh(gpu_mesh(kind))


def test_gpus_without_a_table_run_by_the_rules() -> None:
    with jax_mesh("NVIDIA H100 80GB HBM3"):
        assert choose_gpu_blocks(128, 132, units=64) == rule_gpu_blocks(128, 132, units=64)
        assert choose_prefill_blocks(128, 132) == rule_prefill_blocks(128, 132)


def test_a_table_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, decode=[CHOICE])
    first = read_table(KIND, tmp_path)
    (tmp_path / table_name(KIND)).unlink()
    assert read_table(KIND, tmp_path) is first


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            [{**CHOICE, "units": 1, "sizes": {"warps": 4}}],
            "warps is no size; expected some of consumers, stages, full_share",
        ),
        ([{**CHOICE, "sizes": {"stages": 0}}], "stages is 0; expected an integer from 2 to 8, a multiple of 1"),
        ([{**CHOICE, "sizes": {"stages": True}}], "stages is True; expected an integer"),
        ([{**CHOICE, "sizes": {"consumers": 5}}], "consumers is 5; expected an integer from 1 to 4"),
        ([{**CHOICE, "sizes": {}}], "sizes are {}; expected some of consumers, stages, full_share"),
        ([{"sizes": {"stages": 1}}], "expected an object with the counts head_dim, itemsize, min_units, end_units"),
        (["x"], "decode: 'x'; expected an object"),
    ],
)
def test_a_choice_that_no_kernel_can_run_is_an_error(tmp_path: Path, chosen: list, said: str) -> None:
    write(tmp_path, decode=chosen)
    with pytest.raises(ValueError, match=r"h200\.json: .*make it anew with scripts/tune\.py") as caught:
        read_table(KIND, tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", r"a table of the device \[\]; expected 'NVIDIA H200'"),
        ('{"device": "NVIDIA H100"}', "a table of the device 'NVIDIA H100'; expected 'NVIDIA H200'"),
        (
            '{"device": "NVIDIA H200", "results": {"chosen": {"decode": []}}}',
            "expected lists by the names decode, prefill",
        ),
        ('{"device": "NVIDIA H200", "results": []}', "'list' object has no attribute 'get'"),
    ],
)
def test_a_broken_table_is_an_error_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "h200.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"h200\.json: .*{said}"):
        read_table(KIND, tmp_path)

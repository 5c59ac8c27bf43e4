"""Bytes of a device against the arrays that a server makes, and against what libtpu's compiler reported."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jpaged.accelerators import ACCELERATORS
from jpaged.batch import BatchPacker
from jpaged.config import EngineConfig, SchedulerConfig, StepShape
from jpaged.errors import ConfigError
from jpaged.model_shapes import model_shape
from jpaged.models.weights import abstract_llama
from jpaged.pallas_kernels import PageSpec
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.sequence import SequenceGroup
from jpaged.step_buffers import forward_buffers, token_buffer
from jpaged.step_bytes import (
    can_divide,
    divided,
    input_bytes,
    lent_bytes,
    program_bytes,
    state_bytes,
    stored_page_bytes,
    stored_weight_bytes,
    temporary_bytes,
    tiled_bytes,
)
from jpaged.step_plan import PlannedRow
from tests.fakes import tiny_config
from tests.plans import plan_of_rows

RECORDS = sorted((Path(__file__).parent.parent / "docs" / "benchmarks").glob("tpu-steps-*.json"))
COMPILED = [row for record in RECORDS for row in json.loads(record.read_text())["results"]["steps"]]
each_compiled = pytest.mark.parametrize("row", COMPILED, ids=lambda row: f"{row['topology']} {row['case']}")


def arguments(row) -> int:
    config, shape = model_shape(row["model"]), shape_of(row)
    weights = stored_weight_bytes(config, "bfloat16", tiled=True)
    return weights + state_bytes(shape.num_rows, config.vocab_size, tiled=True) + input_bytes(shape)


def shape_of(row) -> StepShape:
    return StepShape(*(int(part[1:]) for part in row["shape"].split()))


def test_there_are_records_of_three_generations():
    assert {row["topology"].partition(":")[0] for row in COMPILED} >= {"v5e", "v6e", "tpu7x"}
    assert len(COMPILED) >= 18


@each_compiled
def test_arguments_are_those_of_the_compiler_to_a_thousandth(row):
    assert arguments(row) == pytest.approx(row["argument_bytes"], rel=1e-3)


@each_compiled
def test_all_but_the_pages_is_within_two_percent_of_the_compiler(row):
    config, shape = model_shape(row["model"]), shape_of(row)
    chip = ACCELERATORS[row["topology"].partition(":")[0]]
    planned = arguments(row) + temporary_bytes(config, config, shape, chip, itemsize=2) + program_bytes(shape, chip)
    assert planned == pytest.approx(row["argument_bytes"] + row["temp_bytes"] + row["code_bytes"], rel=0.02)


@each_compiled
def test_pages_are_those_of_the_compiler(row):
    assert stored_page_bytes(model_shape(row["model"]), 64, row["pages"], tiled=True) == row["page_bytes"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("name", "tiled"), [("mosaic_tpu", True), ("xla", False)])
def test_pages_are_those_of_their_spec(dtype, name, tiled):
    config = tiny_config(head_dim=64, num_key_value_heads=2, num_attention_heads=4, num_hidden_layers=3)
    spec = PageSpec(2, 32, 2, 64, dtype, name)
    assert stored_page_bytes(config, 32, dtype, tiled=tiled) == 3 * spec.bytes_per_page


@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_weights_are_those_of_the_model(changes, weights):
    config = tiny_config(**changes)
    arrays = jax.tree.leaves(nnx.state(abstract_llama(config, "float32", weights)))
    elements = sum(array.size * array.dtype.itemsize for array in arrays)
    assert stored_weight_bytes(config, "float32", tiled=False, weights=weights) == elements
    tiled = sum(tiled_bytes(array.shape, array.dtype.itemsize) for array in arrays)
    assert stored_weight_bytes(config, "float32", tiled=True, weights=weights) == tiled


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 8), (32, 49152)])
def test_the_state_is_that_of_the_sampler(rows, vocab_size):
    leaves = jax.tree.leaves(jax.eval_shape(lambda: make_sampler_state(rows, vocab_size)))
    assert state_bytes(rows, vocab_size, tiled=False) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    tiled = sum(tiled_bytes(leaf.shape, leaf.dtype.itemsize) for leaf in leaves)
    assert state_bytes(rows, vocab_size, tiled=True) == tiled


@pytest.mark.parametrize("shape", [(1, 1, 4), (512, 64, 300), (2048, 256, 2048), (1, 1, 4, 2), (256, 256, 300, 4)])
def test_inputs_are_those_that_are_packed(shape):
    shape = StepShape(*shape)
    group = SequenceGroup(Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams()))
    (seq,) = group.seqs
    seq.pages, seq.state_index = [1, 2], 0
    row = PlannedRow(seq, 0, 1, samples=True, source=0)
    more = {"num_more": np.array([shape.num_steps - 1])} if shape.num_steps > 1 else {}
    packed, packed_for = BatchPacker((shape,), page_size=4, max_num_seqs=1).pack(
        plan_of_rows([row], num_steps=shape.num_steps, **more)
    )
    assert packed_for == shape
    assert input_bytes(shape) == tiled_bytes(packed.shape, packed.itemsize)


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
def test_parts_add_up_to_the_model(degree):
    config = model_shape("llama-3.1-70b")
    part = divided(config, degree)
    copies = max(degree // config.num_key_value_heads, 1)
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * config.hidden_size
    whole = config.num_parameters + (degree - 1) * norms + (copies - 1) * kv
    assert degree * part.num_parameters == whole
    assert stored_page_bytes(part, 64, "bfloat16", tiled=True) * degree == copies * stored_page_bytes(
        config, 64, "bfloat16", tiled=True
    )


@pytest.mark.parametrize(
    ("name", "degree", "why"),
    [
        ("smollm2-135m", 2, "9 query heads"),
        ("llama-3.1-8b", 3, "32 query heads"),
        ("llama-3.2-3b", 6, "8 KV heads can neither"),
    ],
)
def test_what_cannot_be_divided_is_said(name, degree, why):
    assert why in str(can_divide(model_shape(name), degree))
    with pytest.raises(ConfigError, match=why):
        divided(model_shape(name), degree)


def test_logits_that_fill_vector_memory_are_in_hbm():
    """What libtpu made of two layers of Llama-3.2-1B, a step of 256 rows on v5e: 1,190 MB; and of 32 rows, no tenth."""
    config, chip = model_shape("llama-3.2-1b"), ACCELERATORS["v5e"]
    part = replace(config, num_hidden_layers=2)
    large = temporary_bytes(config, part, StepShape(256, 256, 128), chip, itemsize=2)
    assert large == pytest.approx(1_190_102_016, rel=0.02)
    assert temporary_bytes(config, part, StepShape(32, 32, 128), chip, itemsize=2) < large / 10


def test_longer_steps_and_more_rows_take_more():
    config, chip = model_shape("llama-3.1-8b"), ACCELERATORS["v5e"]

    def temporaries(tokens, rows):
        return temporary_bytes(config, config, StepShape(tokens, rows, 128), chip, itemsize=2)

    assert temporaries(32, 32) < temporaries(64, 64) < temporaries(128, 128) < temporaries(256, 256)
    assert temporaries(2048, 32) < temporaries(8192, 32)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_what_is_lent_is_what_the_runner_lends(rows, steps):
    config = tiny_config()
    shapes = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=512),
        page_buckets=(1, 8),
        decode_steps=steps,
    ).step_shapes(64, 16, "gpu")
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    lent = {token_buffer(shape.num_rows, shape.num_steps) for shape in shapes}
    for shape in shapes:
        lent.update(forward_buffers(shape, *sizes.values(), "bfloat16") if shape.num_steps == 1 else ())
    num_bytes = sum(one.depth * math.prod(one.shape) * one.dtype.itemsize for one in lent)
    assert lent_bytes(shapes, itemsize=2, **sizes) == num_bytes
    assert {shape.num_steps for shape in shapes} == {1, steps}
    assert len({shape for shape in shapes if shape.num_tokens == 512}) == 2 * {1: 1, 32: 1, 300: 3}[rows]


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="dtype is 'int8', expected one of float32"):
        stored_weight_bytes(tiny_config(), "int8", tiled=True)
    with pytest.raises(ConfigError, match="of K and V is 'int4'"):
        stored_page_bytes(tiny_config(), 16, "int4", tiled=True)

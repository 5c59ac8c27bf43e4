"""What a server's compiled steps take of a device, beside the pages: weights, state and inputs to the byte, temporaries
and programs by calibration. Imports no jax.

TPUs keep arrays in tiles, so what an array takes there is more than its elements: `tiled_bytes`. Temporaries and
programs are the compiler's own affair. What libtpu makes of three models' steps (docs/benchmarks/tpu-steps-*.json, 32
rows; 32 and 2,048 tokens) is described by a few figures a generation and a kind of step, which keep the sum of all but
the pages within 2 % of what the compiler reports; a test holds them against those records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from jpaged.accelerators import Accelerator
from jpaged.config import MAX_BANNED_IDS, MAX_BIAS_IDS, StepShape
from jpaged.errors import ConfigError
from jpaged.model_bytes import (
    SCALE_BYTES,
    SCALED,
    WEIGHT_ITEMSIZES,
    kernel_shapes,
    kv_bytes_per_page,
    sampler_bytes,
    weight_bytes,
)
from jpaged.models.config import LlamaConfig
from jpaged.packed_layout import NUM_SAMPLING_FIELDS, packed_size

_LANES: Final = 128
_ROWS: Final = 8
_MAX_RUN: Final = 1024  # elements that vectors are padded to a multiple of
_STEPS_OF_TOKENS: Final = 4  # whose sampled tokens are kept
_CHUNK_TOKENS: Final = 64  # longer steps walk their tokens in a loop for prompt log-probabilities


@dataclass(frozen=True)
class _Compiled:
    """What libtpu makes of a kind of step.

    Attributes:
      extra_rows: logits of so many rows are added to those of the step's.
      layer_bytes: temporaries that each layer adds.
      widest: part of the MLP's widest product, of all tokens, that is in HBM.
      program_bytes: of one compiled step.
      copies_table: the compiler copies the output projection into another layout.
    """

    extra_rows: float
    layer_bytes: float
    widest: float
    program_bytes: float
    copies_table: bool = False


@dataclass(frozen=True)
class _Generation:
    decode: _Compiled
    prefill: _Compiled


# f32 arrays of rows x vocabulary that live at once: logits, noise, keys of the sampler. The compiler keeps most of them
# in vector memory while they are small (steps of 32 and 128 rows), and none of them once they are large (256 rows).
_SMALL_LOGITS: Final = 2.38
_LARGE_LOGITS: Final = 9.06
_V5E: Final = _Generation(_Compiled(43, 1.03e6, 0.0, 37e6), _Compiled(32, 0.90e6, 0.75, 111e6))
_COMPILED: Final[Mapping[str, _Generation]] = MappingProxyType(
    {
        "v5e": _V5E,
        "v6e": _Generation(_Compiled(48, 0.32e6, 0.0, 43e6), _Compiled(-4, 1.65e6, 0.75, 114e6)),
        "tpu7x": _Generation(_Compiled(40, 1.46e6, 0.0, 58e6), _Compiled(-3, 0.91e6, 0.0, 120e6, copies_table=True)),
        # Whole steps were not compiled for these; their cores are close kin of v5e's.
        "v4": _V5E,
        "v5p": _V5E,
    }
)
_OTHER: Final = _Compiled(0, 0.0, 2.0, 8e6)  # GPUs and CPUs: a bound, not calibrated


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes that an array of one or two axes takes in a TPU's memory; of two, the last is the one that pads less.

    Example:
      >>> tiled_bytes((576, 960), 2), 576 * 960 * 2
      (1179648, 1105920)
      >>> tiled_bytes((576,), 2), tiled_bytes((33,), 4)
      (2048, 512)
    """
    if len(shape) == 1:
        run = next(size for size in (128, 256, 512, _MAX_RUN) if size >= min(shape[0], _MAX_RUN))
        return _up(shape[0], run) * itemsize
    rows, columns = shape
    return itemsize * min(_up(a, _ROWS) * _up(b, _LANES) for a, b in ((rows, columns), (columns, rows)))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def can_divide(config: LlamaConfig, degree: int) -> str | None:
    """Why a model's tensors cannot be divided among so many devices; `None` if they can.

    Example:
      >>> from jpaged.model_shapes import model_shape
      >>> can_divide(model_shape("llama-3.1-70b"), 16), can_divide(model_shape("smollm2-135m"), 2)
      (None, '9 query heads cannot be divided by 2')
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % degree:
        return f"{heads} query heads cannot be divided by {degree}"
    if kv_heads % degree and degree % kv_heads:
        return f"{kv_heads} KV heads can neither be divided by {degree} nor be repeated evenly on {degree} devices"
    if config.intermediate_size % degree:
        return f"the MLP's width of {config.intermediate_size} cannot be divided by {degree}"
    return None


def divided(config: LlamaConfig, degree: int) -> LlamaConfig:
    """What one of `degree` devices holds of a model: its heads, its part of the MLP and of the vocabulary's tables.

    Norms are whole on every device. Where there are more devices than KV heads, each of them holds one KV head, and
    several the same.

    Raises:
      ConfigError: the model cannot be divided so.

    Example:
      >>> from jpaged.model_shapes import model_shape
      >>> part = divided(model_shape("llama-3.1-70b"), 16)
      >>> part.num_attention_heads, part.num_key_value_heads, part.intermediate_size, part.vocab_size
      (4, 1, 1792, 8016)
    """
    if (objection := can_divide(config, degree)) is not None:
        raise ConfigError(objection)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // degree,
        num_key_value_heads=max(config.num_key_value_heads // degree, 1),
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size // degree,
        vocab_size=-(-config.vocab_size // degree),
        bos_token_id=None,  # its rows of the table may lie on another device
        eos_token_ids=(),
    )


def stored_weight_bytes(part: LlamaConfig, dtype: str, *, tiled: bool, weights: str | None = None) -> int:
    """Bytes of a device's weights.

    Args:
      part: what the device holds (`divided`).
      dtype: of the weights.
      tiled: on a TPU, where arrays are padded.
      weights: the form of the layers' kernels, if another: "int8" or "fp8".

    Raises:
      ConfigError: `dtype` is no dtype of weights, or `weights` no form of them.
    """
    untiled = weight_bytes(part, dtype, weights)  # refuses what is neither
    if not tiled:
        return untiled
    itemsize, width, kernels = WEIGHT_ITEMSIZES[dtype], part.hidden_size, kernel_shapes(part)
    vectors = [(width,), (width,)]
    if part.attention_bias:
        vectors += [(kernels[0][1],), (width,)]
    layer = sum(tiled_bytes(shape, itemsize) for shape in vectors)
    layer += sum(tiled_bytes(shape, itemsize if weights is None else 1) for shape in kernels)
    if weights is not None:
        layer += sum(tiled_bytes((columns,), 4) for _, columns in kernels)
    tables = [(part.vocab_size, width)] * (1 if part.tie_word_embeddings else 2)
    return part.num_hidden_layers * layer + sum(tiled_bytes(shape, itemsize) for shape in [*tables, (width,)])


def stored_page_bytes(part: LlamaConfig, page_size: int, dtype: str, *, tiled: bool) -> int:
    """Bytes of a page's K, V and scales over all layers, on one device.

    Raises:
      ConfigError: `dtype` is no dtype of pages.
    """
    untiled = kv_bytes_per_page(part, page_size, dtype)  # refuses what is none
    rows = page_size * part.num_key_value_heads
    padding = _up(rows, _LANES) - rows if tiled and dtype in SCALED else 0  # of the scales of K, and of V
    return untiled + part.num_hidden_layers * 2 * SCALE_BYTES * padding


def state_bytes(max_num_seqs: int, vocab_size: int, *, tiled: bool) -> int:
    """Bytes of the sampler's state (`jpaged.sampler_state`)."""
    if not tiled:
        return sampler_bytes(max_num_seqs, vocab_size)
    entries, words = max_num_seqs + 1, -(-vocab_size // 32)
    lists = ((MAX_BIAS_IDS, 4), (MAX_BIAS_IDS, 4), (MAX_BANNED_IDS, 4))
    matrices = ((vocab_size, 4), (vocab_size, 1), *lists, (words, 4))
    return sum(tiled_bytes((entries, width), size) for width, size in matrices) + tiled_bytes((entries,), 4)


def input_bytes(shape: StepShape) -> int:
    """Bytes of what a step is told: the packed array, whose page table is most of it.

    Example:
      >>> input_bytes(StepShape(32, 32, 128)), input_bytes(StepShape(2048, 32, 128))
      (20480, 53248)
      >>> input_bytes(StepShape(256, 256, 128)), input_bytes(StepShape(256, 256, 128, num_steps=4))
      (159744, 167936)
    """
    return tiled_bytes((packed_size(shape),), 4)


def lent_bytes(shapes: Iterable[StepShape], *, vocab_size: int, hidden_size: int, itemsize: int) -> int:
    """Bytes that the steps of a GPU keep to write over (`jpaged.step_buffers`): logits and more by rows, hidden states.

    Args:
      shapes: of the steps. Those that decode several times keep token ids alone.
      vocab_size, hidden_size: of the model.
      itemsize: of hidden states.

    Example:
      >>> lent_bytes([StepShape(512, 256, 128)], vocab_size=128256, hidden_size=4096, itemsize=2) / 1e6
      135.549952
    """
    shapes = list(shapes)
    forward = [shape for shape in shapes if shape.num_steps == 1]
    rows, tokens = {shape.num_rows for shape in forward}, {shape.num_tokens for shape in forward}
    num_ids = sum(rows * steps for rows, steps in {(shape.num_rows, shape.num_steps) for shape in shapes})
    words = (vocab_size + NUM_SAMPLING_FIELDS) * sum(rows) + _STEPS_OF_TOKENS * num_ids
    return 4 * words + hidden_size * itemsize * sum(tokens)


def temporary_bytes(
    config: LlamaConfig, part: LlamaConfig, shape: StepShape, accelerator: Accelerator, *, itemsize: int
) -> int:
    """Bytes of the temporaries of one step, by calibration.

    Args:
      config: the whole model: logits are gathered for sampling.
      part: what the device holds of it.
      shape: of the step.
      accelerator: where it runs.
      itemsize: of activations.
    """
    kind = _kind(shape, accelerator)
    logits = 4 * config.vocab_size * shape.num_rows
    if accelerator.platform != "tpu" or logits > accelerator.vmem_bytes // 4:
        size = _LARGE_LOGITS * logits
    else:
        size = _SMALL_LOGITS * 4 * config.vocab_size * max(shape.num_rows + kind.extra_rows, 1)
    size += kind.layer_bytes * part.num_hidden_layers
    size += kind.widest * shape.num_tokens * 2 * part.intermediate_size * itemsize
    if kind.copies_table:
        size += tiled_bytes((part.vocab_size, part.hidden_size), itemsize)
    return round(size)


def program_bytes(shape: StepShape, accelerator: Accelerator) -> int:
    """Bytes of one compiled step, which stays on the device, by calibration."""
    return round(_kind(shape, accelerator).program_bytes)


def _kind(shape: StepShape, accelerator: Accelerator) -> _Compiled:
    if accelerator.platform != "tpu":
        return _OTHER
    generation = _COMPILED[accelerator.name]
    return generation.prefill if shape.num_tokens > max(shape.num_rows, _CHUNK_TOKENS) else generation.decode

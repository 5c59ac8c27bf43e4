"""Bytes of a model's weights, of its K and V, and of the sampler's state, from its config alone. Imports no jax.

What the device arrays take is defined by `jpaged.pallas_kernels.PageSpec` and `jpaged.sampler_state`, which need jax;
tests hold these sums against them.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from jpaged.config import MAX_BANNED_IDS, MAX_BIAS_IDS
from jpaged.errors import ConfigError
from jpaged.models.config import LlamaConfig
from jpaged.models.parameter_map import check_form

WEIGHT_ITEMSIZES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_ITEMSIZES: Final[Mapping[str, int]] = {**WEIGHT_ITEMSIZES, "int8": 1, "float8_e4m3fn": 1}
SCALED: Final = ("int8", "float8_e4m3fn")
SCALE_BYTES: Final = 4
_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def weight_bytes(config: LlamaConfig, dtype: str, weights: str | None = None) -> int:
    """Bytes of the model's parameters.

    Args:
      config: the model's shape.
      dtype: of the parameters.
      weights: the form of the layers' kernels, if another: "int8" or "fp8".

    Raises:
      ConfigError: `dtype` is no dtype of weights, or `weights` no form of them.

    Example:
      >>> from jpaged.model_shapes import model_shape
      >>> [weight_bytes(model_shape("llama-3.1-8b"), "bfloat16", weights) // 10**8 for weights in (None, "int8")]
      [160, 90]
    """
    if dtype not in WEIGHT_ITEMSIZES:
        raise ConfigError(f"dtype is {dtype!r}, expected one of {', '.join(WEIGHT_ITEMSIZES)}")
    check_weights(weights)
    itemsize = WEIGHT_ITEMSIZES[dtype]
    if weights is None:
        return config.num_parameters * itemsize
    saved = sum(rows * columns * (itemsize - 1) - columns * SCALE_BYTES for rows, columns in kernel_shapes(config))
    return config.num_parameters * itemsize - config.num_hidden_layers * saved


def kernel_shapes(config: LlamaConfig) -> list[tuple[int, int]]:
    """Shapes [in, out] of the kernels of a layer: q, k and v; o; gate and up; down.

    Example:
      >>> from jpaged.model_shapes import model_shape
      >>> kernel_shapes(model_shape("llama-3.1-8b"))
      [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    """
    width, mlp, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    qkv = (heads + 2 * config.num_key_value_heads) * config.head_dim
    return [(width, qkv), (heads * config.head_dim, width), (width, 2 * mlp), (mlp, width)]


def check_weights(weights: object) -> None:
    """Refuses what is no form of weights.

    Raises:
      ConfigError: neither `None` nor one of `WEIGHT_FORMS`.
    """
    if weights is not None:
        check_form(weights)


def kv_bytes_per_page(config: LlamaConfig, page_size: int, dtype: str) -> int:
    """Bytes of K, V and scales of one page over all layers; of one token for a page size of 1.

    Raises:
      ConfigError: `dtype` is no dtype of pages.

    Example:
      >>> from jpaged.model_shapes import model_shape
      >>> kv_bytes_per_page(model_shape("llama-3-8b"), 16, "bfloat16") == 16 * 128 * 1024
      True
    """
    if dtype not in KV_ITEMSIZES:
        raise ConfigError(f"the dtype of K and V is {dtype!r}, expected one of {', '.join(KV_ITEMSIZES)}")
    head = config.head_dim * KV_ITEMSIZES[dtype] + (SCALE_BYTES if dtype in SCALED else 0)
    return config.num_hidden_layers * page_size * config.num_key_value_heads * 2 * head


def sampler_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes of the sampler's state: for each sequence, and one more, counts and a mask over the vocabulary, a mask of a
    bit a token, the last token, biased and banned ids."""
    lists = MAX_BIAS_IDS * (4 + 4) + MAX_BANNED_IDS * 4
    return (max_num_seqs + 1) * (vocab_size * (4 + 1) + 4 * -(-vocab_size // 32) + 4 + lists)


def parse_bytes(text: str) -> int:
    """The bytes that a size such as "141GB" (decimal, 10^9) or "80GiB" (binary, 2^30) stands for.

    Raises:
      ConfigError: no number, no known unit, or nothing.

    Example:
      >>> parse_bytes("141GB"), parse_bytes("1.5 GiB"), parse_bytes("4096")
      (141000000000, 1610612736, 4096)
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,12})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(Decimal(match[1]) * units[match[2].lower()]) if match and match[2].lower() in units else 0
    if size < 1:
        raise ConfigError(
            f"the memory is {text!r:.40}, expected a number and a unit: 141GB (KB, MB, GB, TB are powers of 1000) or "
            "80GiB (KiB, MiB, GiB, TiB are powers of 1024)"
        )
    return size


def format_bytes(size: float) -> str:
    """A size in both kinds of unit.

    Example:
      >>> format_bytes(141 * 10**9), format_bytes(2 * 2**20), format_bytes(512)
      ('141.00 GB (131.32 GiB)', '2.10 MB (2.00 MiB)', '512 B')
    """
    for power, letter in ((3, "G"), (2, "M"), (1, "K")):
        if size >= 1000**power:
            return f"{size / 1000**power:,.2f} {letter}B ({size / 1024**power:,.2f} {letter}iB)"
    return f"{size:,.0f} B"

"""Sizes that a server takes by its chip: tokens a page and a step, decode steps a program, page tables. No jax.

The rules of the Mosaic TPU kernel's pages are those of `jpaged.kv_cache.default_page_size` and
`jpaged.pallas_kernels.tpu_tuning.shape_objection`, which need jax; a test holds them together.
"""

from collections.abc import Sequence
from typing import Final

from jpaged.accelerators import Accelerator
from jpaged.config import DEFAULT_PAGE_SIZE, SchedulerConfig
from jpaged.models.config import LlamaConfig
from jpaged.step_bytes import stored_page_bytes

# The Mosaic TPU kernel fetches a page by one DMA: one of so many bytes hides most of its latency.
TPU_PAGE_BYTES: Final = 128 << 10
TPU_PAGE_SIZES: Final = (64, 128)
_TPU_HEAD_DIMS: Final = (64, 128, 256)
_TPU_MAX_PAGE_SIZE: Final = 512
_TPU_ROWS: Final = {"float32": 8, "bfloat16": 16, "int8": 128, "float8_e4m3fn": 128}
_TABLE_BYTES: Final = 1 << 20
SOON_READ_BYTES: Final = 3 * 10**9  # at 3 TB/s and more, the rate of GPUs that serve: in a millisecond


def tpu_kernel_takes(part: LlamaConfig, page_size: int, dtype: str) -> bool:
    """Whether the Mosaic TPU kernel runs on such pages of what a device holds; XLA's attention does else."""
    tile = _TPU_ROWS.get(dtype)
    return (
        tile is not None
        and part.head_dim in _TPU_HEAD_DIMS
        and page_size % 8 == 0
        and page_size <= _TPU_MAX_PAGE_SIZE
        and page_size * part.num_key_value_heads % tile == 0
    )


def default_page_size(part: LlamaConfig, dtype: str, accelerator: Accelerator) -> int:
    """Token slots a page, as the engine chooses.

    Example:
      >>> from jpaged.accelerators import ACCELERATORS
      >>> from jpaged.model_shapes import model_shape
      >>> [default_page_size(model_shape("llama-3.1-8b"), "bfloat16", ACCELERATORS[name]) for name in ("v5e", "h200")]
      [64, 16]
    """
    small, large = TPU_PAGE_SIZES
    if accelerator.platform != "tpu" or not any(tpu_kernel_takes(part, size, dtype) for size in TPU_PAGE_SIZES):
        return DEFAULT_PAGE_SIZE
    bytes_of_layer = stored_page_bytes(part, small, dtype, tiled=True) // part.num_hidden_layers
    return small if bytes_of_layer >= TPU_PAGE_BYTES and tpu_kernel_takes(part, small, dtype) else large


def attention_of(part: LlamaConfig, page_size: int, dtype: str, accelerator: Accelerator) -> str:
    """The attention back end, as far as it can be told without the device."""
    if accelerator.platform == "tpu":
        return "mosaic_tpu" if tpu_kernel_takes(part, page_size, dtype) else "xla"
    return "xla" if accelerator.platform == "cpu" else "mosaic_gpu where it can run, else xla"


def token_budget(max_num_seqs: int, accelerator: Accelerator) -> int:
    """Tokens of a step, prefill and decode together.

    The smallest power of two that is twice what it takes to make the matrix units, not the reading of weights, the
    bound of a step: fewer would waste them, more would make those who decode wait longer for the same. On GPUs eight
    times as much: their products of 512 rows run at nine tenths of the rate that those of 2,048 reach.

    Example:
      >>> from jpaged.accelerators import ACCELERATORS
      >>> {name: token_budget(32, chip) for name, chip in ACCELERATORS.items()}
      {'v4': 512, 'v5e': 512, 'v5p': 512, 'v6e': 2048, 'tpu7x': 1024, 'h200': 2048, 'cpu': 512}
    """
    ridges = 8 if accelerator.platform == "gpu" else 2
    least = max(SchedulerConfig.max_num_batched_tokens, max_num_seqs, ridges * accelerator.ridge_tokens)
    return 1 << (least - 1).bit_length()


def prefill_budget(budget: int, accelerator: Accelerator) -> int | None:
    """Tokens of a step in which no row waits for its next token; `None`: as many as of any other.

    On GPUs twice as many, by which an H200 gains (docs/LOG.md, "Prefill by the token budget"). What larger steps cost
    is the time of those who decode, and there are none. Elsewhere it was not measured.

    Args:
      budget: `token_budget`.
      accelerator: the chip.

    Example:
      >>> from jpaged.accelerators import ACCELERATORS
      >>> [prefill_budget(2048, ACCELERATORS[name]) for name in ("h200", "v6e", "cpu")]
      [4096, None, None]
    """
    return 2 * budget if accelerator.platform == "gpu" else None


def token_budgets(
    max_num_seqs: int,
    accelerator: Accelerator,
    *,
    budget: int | None = None,
    prefill: int | None = None,
    buckets: Sequence[int] | None = None,
) -> tuple[int, int | None]:
    """`token_budget` and `prefill_budget` where they were not asked for, and what was asked for where they were.

    There is no larger budget by the chip beside a budget or sizes that were asked for: they say what a step may be.

    Args:
      budget, prefill, buckets: `max_num_batched_tokens`, `max_num_prefill_tokens` and `token_buckets`; `None`: not
        asked for.

    Example:
      >>> from jpaged.accelerators import ACCELERATORS
      >>> h200 = ACCELERATORS["h200"]
      >>> token_budgets(32, h200), token_budgets(32, h200, budget=512), token_budgets(32, h200, prefill=8192)
      ((2048, 4096), (512, None), (2048, 8192))
    """
    chosen = budget or token_budget(max_num_seqs, accelerator)
    if prefill is None and budget is None and buckets is None:
        prefill = prefill_budget(chosen, accelerator)
    return chosen, prefill


def decode_steps(weight_bytes: int, platform: str) -> int:
    """`EngineConfig.decode_steps` where it is `None`.

    A GPU that has read all weights sooner than a host has handed over a step, which takes that about a millisecond,
    waits for it. Four steps at once make that up; of more, a request that comes meanwhile would notice the time.

    Args:
      weight_bytes: of all weights that the device holds.
      platform: of the device.

    Example:
      >>> decode_steps(269_030_016, "gpu"), decode_steps(269_030_016, "tpu"), decode_steps(3 * 10**9, "gpu")
      (4, 1, 1)
    """
    return 4 if platform == "gpu" and weight_bytes < SOON_READ_BYTES else 1


def page_buckets(max_num_seqs: int, max_model_len: int, page_size: int) -> tuple[int, ...]:
    """Padded numbers of pages a row: one, or a small one too where the page table of all rows passes a MiB a step.

    Example:
      >>> page_buckets(64, 131072, 64), page_buckets(256, 131072, 64)
      ((2048,), (256, 2048))
    """
    pages = -(-max_model_len // page_size)
    return (pages,) if 4 * max_num_seqs * pages <= _TABLE_BYTES else (-(-pages // 8), pages)

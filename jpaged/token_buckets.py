"""The padded sizes of compiled steps: how many tokens, and how many rows steps of so many tokens have."""

from collections.abc import Sequence
from typing import Final

_FEW_ROWS: Final = (64, 256)


def default_token_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, platform: str = "cpu", max_num_prefill_tokens: int | None = None
) -> tuple[int, ...]:
    """Padded numbers of tokens: of decode rows to `max_num_seqs`, of steps with prompts above, to the budgets.

    CPU: steps four times as large as the last, as compiling is dear. TPU: the same, none of less than a tile's 8 rows.
    GPU: close together from 128 to 256, where products take the time of their rows and no longer that of their weights,
    and further apart above and below; above all rows, twice as large each, for where prompts wait a step is cut to fit
    (`Planner`). Both budgets are sizes of their own; between them a GPU has its powers of two, and the others have
    nothing.

    Args:
      max_num_seqs, max_num_batched_tokens, max_num_prefill_tokens: see `SchedulerConfig`.
      platform: "cpu", "gpu" or "tpu".

    Example:
      >>> default_token_buckets(32, 512), default_token_buckets(64, 512, "tpu", 1024)
      ((1, 4, 16, 32, 128, 512), (8, 32, 64, 256, 512, 1024))
      >>> default_token_buckets(512, 2048, "gpu", 4096)
      (1, 8, 32, 64, 128, 160, 192, 224, 256, 384, 512, 1024, 2048, 4096)
    """
    largest = max_num_prefill_tokens or max_num_batched_tokens
    if platform == "gpu":
        powers = [1 << n for n in range(6, largest.bit_length())]
        decode = [1, 8, 32, *powers, 160, 224, *(3 * power // 2 for power in powers if power > 64)]
        sizes = {size for size in decode if size < max_num_seqs} | {size for size in powers if size > max_num_seqs}
    else:
        sizes = set()
        for size, end in ((8 if platform == "tpu" else 1, max_num_seqs), (4 * max_num_seqs, max_num_batched_tokens)):
            while size < end:
                sizes.add(size)
                size *= 4
    sizes = {size for size in sizes if size < largest}
    return tuple(sorted(sizes | {max_num_seqs, max_num_batched_tokens, largest}))


def rows_of(num_tokens: int, most: int, token_buckets: Sequence[int], budget: int, platform: str) -> list[int]:
    """Padded numbers of rows of steps of so many tokens, ascending: `most`, and fewer too for a GPU's largest prompts.

    They often hold few rows, but logits take time by all, padding included. Sizes are token buckets, so no sampling
    program is added. Each shape compiles all layers again: smaller steps, which prompts are rarely cut to fill, do not
    pay for that, nor do CPUs and TPUs, where compiling is dearer and no gain was measured. Steps that are larger than
    the budget, in which nobody decodes, have the least of the small sizes alone, or all rows: they are many programs
    already.

    Args:
      num_tokens: one of the buckets.
      most: rows that such steps can have.
      token_buckets: ascending.
      budget: tokens of a step in which rows decode, at the most; the first bucket that holds so many is the one that is
        compiled for all small sizes.
      platform: "cpu", "gpu" or "tpu".

    Example:
      >>> [rows_of(size, 512, (64, 256, 512, 2048, 4096), 2048, "gpu") for size in (512, 2048, 4096)]
      [[512], [64, 256, 512], [64, 512]]
    """
    full = next(size for size in token_buckets if size >= budget)
    if platform != "gpu" or not most < num_tokens >= full:
        return [min(num_tokens, most)]
    sizes = [rows for rows in _FEW_ROWS if rows < most and rows in token_buckets]
    return [*(sizes if num_tokens == full else sizes[:1]), most]

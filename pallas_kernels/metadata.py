"""`PagedMetadata`: which token belongs to which row, and where each row's pages are."""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Int32


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedMetadata:
    """What paged attention needs to know of a step; one for all layers. All is data, so the mix never recompiles.

    Row s owns the query tokens [cu_q_lens[s], cu_q_lens[s + 1]), which are its last ones: query token i of the row
    stands at position kv_lens[s] - q_lens[s] + i. Rows [0, num_decode) have few query tokens (this version's engine:
    one; with speculation, up to its static width), rows [num_decode, num_seqs) are prefill chunks, rows [num_seqs, S)
    are padding with q_len 0 and kv_len 0.

    Attributes:
      page_table: page ids of each row in order; entries past the row's pages are 0, the null page.
      kv_lens: KV tokens of each row, those of this step included.
      cu_q_lens: prefix sums of the rows' query tokens; padding repeats the last one.
      positions: position of each token in its sequence; 0 for padding.
      slot_mapping: slot of each token in the pool, page * page_size + offset; 0 (in the null page) for padding. Tokens
        of a row stand side by side, in the order of their slots, and rows do not share a page that is written.
      num_decode: leading rows with few query tokens; this version's engine gives them one.
      num_seqs: live rows.
      work: a back end's own schedule, made once a step by `plan_attention`; `None` before.
    """

    page_table: Int32[Array, "S P"]
    kv_lens: Int32[Array, " S"]
    cu_q_lens: Int32[Array, " S+1"]
    positions: Int32[Array, " T"]
    slot_mapping: Int32[Array, " T"]
    num_decode: Int32[Array, ""]
    num_seqs: Int32[Array, ""]
    work: Any = None

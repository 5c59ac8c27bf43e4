"""Where each field lies in the array that tells a step all that it needs to know (`jpaged.batch`). Imports no jax.

Of a step of shape (T, S, P), in words of 32 bits:

    field         length    meaning
    tokens        T         token ids; -1 - entry means "the token that was sampled last for this state entry"
    positions     T         position of each token in its sequence
    slots         T         slot_mapping: page * page_size + offset
    next_tokens   T         the token that follows, for prompt log-probabilities; 0 where unknown
    page_table    S * P     page ids, null page in every hole
    kv_lens       S
    cu_q_lens     S + 1
    sources       S         index in [0, T) of the token that the row samples after
    row_steps     S         decode steps in which the row takes part; this and the next only if there are several
    stop_ids      8 * S     tokens after which it takes part in no more of them; -1 where there are fewer
    scalars       3         num_decode, num_seqs, wants_prompt_logprobs
    sampling      F * S     sampling parameters, floats by their bits (`SAMPLING_FIELDS`)
"""

from typing import Final

from jpaged.config import StepShape

NUM_STOP_IDS: Final = 8  # that the device knows of a row; those of more it looks for on the host alone

# Field by field as packed: every field is one 32-bit word a row. "b" is a bool in a word.
SAMPLING_FIELDS: Final = (
    ("state_index", "i"),
    ("temperature", "f"),
    ("top_k", "i"),
    ("top_p", "f"),
    ("min_p", "f"),
    ("repetition_penalty", "f"),
    ("presence_penalty", "f"),
    ("frequency_penalty", "f"),
    ("seed_high", "I"),
    ("seed_low", "I"),
    ("position", "i"),
    ("samples", "b"),
    ("uses_penalties", "b"),
    ("uses_bias", "b"),
    ("bans_stops", "b"),
    ("uses_mask", "b"),
    ("num_logprobs", "i"),
)
NUM_SAMPLING_FIELDS: Final = len(SAMPLING_FIELDS)


def packed_layout(shape: StepShape) -> dict[str, slice]:
    """Where each field lies in the packed array; in order, without gaps.

    Example:
      >>> one, several = packed_layout(StepShape(8, 4, 2)), packed_layout(StepShape(4, 4, 2, num_steps=3))
      >>> one["page_table"], one["stop_ids"], several["stop_ids"]
      (slice(32, 40, None), slice(53, 53, None), slice(41, 73, None))
    """
    t, s, p = shape.num_tokens, shape.num_rows, shape.pages_per_row
    lengths = {
        "tokens": t,
        "positions": t,
        "slots": t,
        "next_tokens": t,
        "page_table": s * p,
        "kv_lens": s,
        "cu_q_lens": s + 1,
        "sources": s,
        "row_steps": s if shape.num_steps > 1 else 0,
        "stop_ids": s * NUM_STOP_IDS if shape.num_steps > 1 else 0,
        "scalars": 3,
        "sampling": NUM_SAMPLING_FIELDS * s,
    }
    fields, start = {}, 0
    for name, length in lengths.items():
        fields[name] = slice(start, start + length)
        start += length
    return fields


def packed_size(shape: StepShape) -> int:
    """Length of the packed array, in int32 words."""
    return packed_layout(shape)["sampling"].stop

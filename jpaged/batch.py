"""`StepPlan` -> one packed int32 array on the host -> `StepInputs` on the device.

All that a step needs to be told goes over in one transfer. The array holds, for a step of shape (T, S, P):

    field         length    meaning
    tokens        T         token ids; -1 - entry means "the token that state entry sampled last" (still on the device)
    positions     T         position of each token in its sequence
    slots         T         slot_mapping: page * page_size + offset
    count_entry   T         state entry whose penalty counts the token enters; the null entry if none
    is_output     T         1 if the token is output, 0 if prompt
    next_tokens   T         the token that follows, for prompt log-probabilities; 0 where unknown
    page_table    S * P     page ids, null page in every hole
    kv_lens       S
    cu_q_lens     S + 1
    sources       S         index in [0, T) of the token that the row samples after
    scalars       3         num_decode, num_seqs, wants_prompt_logprobs
    sampling      F * S     sampling parameters, floats by their bits (`sampling_rows`)
"""

from dataclasses import dataclass
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32

from jpaged.config import StepShape
from jpaged.pallas_kernels import PagedMetadata
from jpaged.sampling_rows import (
    NUM_SAMPLING_FIELDS,
    SamplingRow,
    SamplingRows,
    sampling_fields,
    unpack_sampling_rows,
)
from jpaged.sequence import Sequence
from jpaged.step_plan import PlannedRow, StepPlan


def _layout(shape: StepShape) -> dict[str, slice]:
    """Where each field lies in the packed array; in order, without gaps."""
    t, s, p = shape.num_tokens, shape.num_rows, shape.pages_per_row
    lengths = {
        "tokens": t,
        "positions": t,
        "slots": t,
        "count_entry": t,
        "is_output": t,
        "next_tokens": t,
        "page_table": s * p,
        "kv_lens": s,
        "cu_q_lens": s + 1,
        "sources": s,
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
    return _layout(shape)["sampling"].stop


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What one step is told, on the device.

    Attributes:
      tokens: ids, or -1 - entry for a token that is still on the device.
      count_entry: state entry that counts the token (the null entry if none does).
      is_output: the token is output, not prompt.
      next_tokens: for prompt log-probabilities.
      source: index in [0, T) of the token that each row samples after: its last one, or, for a sequence that was just
        forked, that of its parent; 0 for padding rows.
      meta: for paged attention.
      sampling: parameters of each row.
      wants_prompt_logprobs: some row asks for them.
    """

    tokens: Int32[Array, " T"]
    count_entry: Int32[Array, " T"]
    is_output: Bool[Array, " T"]
    next_tokens: Int32[Array, " T"]
    source: Int32[Array, " S"]
    meta: PagedMetadata
    sampling: SamplingRows
    wants_prompt_logprobs: Bool[Array, ""]


def unpack(packed: Int32[Array, " W"], shape: StepShape) -> StepInputs:
    """The device side of `BatchPacker.pack`; runs inside the jitted step."""
    field = {name: packed[where] for name, where in _layout(shape).items()}
    num_decode, num_seqs, wants_prompt_logprobs = field["scalars"]
    return StepInputs(
        tokens=field["tokens"],
        count_entry=field["count_entry"],
        is_output=field["is_output"] != 0,
        next_tokens=field["next_tokens"],
        source=field["sources"],
        meta=PagedMetadata(
            page_table=field["page_table"].reshape(shape.num_rows, shape.pages_per_row),
            kv_lens=field["kv_lens"],
            cu_q_lens=field["cu_q_lens"],
            positions=field["positions"],
            slot_mapping=field["slots"],
            num_decode=num_decode,
            num_seqs=num_seqs,
        ),
        sampling=unpack_sampling_rows(field["sampling"].reshape(NUM_SAMPLING_FIELDS, shape.num_rows)),
        wants_prompt_logprobs=wants_prompt_logprobs != 0,
    )


class BatchPacker:
    """Packs plans. Keeps the page tables of running sequences as one array, so that a step copies rows, not lists.

    Args:
      shapes: the shapes that a step may have, ascending.
      page_size: token slots a page.
      max_num_seqs: state entries; the null entry has this index.
    """

    def __init__(self, shapes: tuple[StepShape, ...], *, page_size: int, max_num_seqs: int):
        self._shapes = shapes
        self._page_size = page_size
        self._null_entry = max_num_seqs
        self._page_table = np.zeros((max_num_seqs, max(s.pages_per_row for s in shapes)), np.int32)
        # Whose pages, and which version of them, the entry's row of the table holds, and how many of them.
        self._owner: list[tuple[Sequence, int] | None] = [None] * max_num_seqs
        self._filled = [0] * max_num_seqs

    def shape_for(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds the plan."""
        pages = max(len(seq.pages) for seq in plan.seqs)
        for shape in self._shapes:
            if shape.num_tokens >= plan.num_tokens and shape.num_rows >= plan.num_seqs and shape.pages_per_row >= pages:
                return shape
        raise RuntimeError(
            f"a plan of {plan.num_tokens} tokens, {plan.num_seqs} rows and {pages} pages a row fits no step shape; "
            f"the largest is {self._shapes[-1]}"
        )

    def pack(self, plan: StepPlan) -> tuple[Int32[np.ndarray, " W"], StepShape]:
        """The packed array of a plan, padded to its shape."""
        shape = self.shape_for(plan)
        packed = np.zeros(packed_size(shape), np.int32)
        view = {name: packed[where] for name, where in _layout(shape).items()}
        seqs = plan.seqs
        num_seqs, num_tokens = len(seqs), plan.num_tokens
        q_lens = np.array(plan.q_lens, np.int32)
        starts = np.array(plan.starts, np.int32)
        entries = np.array([state_index(seq) for seq in seqs], np.int32)
        ends = np.cumsum(q_lens, dtype=np.int32)
        num_rows = num_seqs - int((q_lens == 0).sum())  # forks stand last; attention does not see them

        # Token i of the step is token i - (its row's first token) of that row.
        first = np.repeat(ends - q_lens, q_lens)
        positions = np.repeat(starts, q_lens) + np.arange(num_tokens, dtype=np.int32) - first
        entry_of_token = np.repeat(entries, q_lens)
        self._refresh_page_table(seqs)
        pages = self._page_table[entry_of_token, positions // self._page_size]

        view["tokens"][:num_tokens] = self._tokens(plan)
        view["positions"][:num_tokens] = positions
        view["slots"][:num_tokens] = pages * self._page_size + positions % self._page_size
        table = view["page_table"].reshape(shape.num_rows, -1)
        table[:num_rows] = self._page_table[entries[:num_rows], : shape.pages_per_row]
        view["kv_lens"][:num_rows] = (starts + q_lens)[:num_rows]
        view["cu_q_lens"][1 : num_seqs + 1] = ends
        view["cu_q_lens"][num_seqs + 1 :] = num_tokens
        view["sources"][:num_seqs] = ends[plan.sources] - 1
        wants_prompt_logprobs = self._next_tokens(plan, view["next_tokens"])
        view["scalars"][:] = plan.num_decode, num_rows, wants_prompt_logprobs

        counted = np.array([seq.request.params.uses_penalties for seq in seqs])
        view["count_entry"][:] = self._null_entry
        if counted.any():
            view["count_entry"][:num_tokens] = np.where(np.repeat(counted, q_lens), entry_of_token, self._null_entry)
            prompt_lens = np.array([seq.num_prompt_tokens for seq in seqs], np.int32)
            view["is_output"][:num_tokens] = positions >= np.repeat(prompt_lens, q_lens)
        sampling = sampling_fields(list(map(_sampling_row, plan.rows)), shape.num_rows, self._null_entry)
        view["sampling"].reshape(NUM_SAMPLING_FIELDS, shape.num_rows)[:] = sampling
        return packed, shape

    def _refresh_page_table(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            entry = state_index(seq)
            owner = self._owner[entry]
            if owner is None or owner[0] is not seq or owner[1] != seq.pages_version:
                self._owner[entry] = (seq, seq.pages_version)
                self._filled[entry] = 0
                self._page_table[entry] = 0
            filled = self._filled[entry]
            if filled != len(seq.pages):
                self._page_table[entry, filled : len(seq.pages)] = seq.pages[filled:]
                self._filled[entry] = len(seq.pages)

    @staticmethod
    def _tokens(plan: StepPlan) -> list[int]:
        tokens: list[int] = []
        for seq, start, q_len in zip(plan.seqs, plan.starts, plan.q_lens, strict=True):
            known = seq.tokens[start : start + q_len]
            tokens += known
            if len(known) < q_len:  # sampled by a step in flight: the device knows it, the host does not
                tokens.append(-1 - state_index(seq))
        return tokens

    @staticmethod
    def _next_tokens(plan: StepPlan, out: np.ndarray) -> bool:
        """Writes the prompt token that follows each prompt token of the rows that ask; says whether any does."""
        wanted, at = False, 0
        for seq, start, q_len in zip(plan.seqs, plan.starts, plan.q_lens, strict=True):
            if seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens - 1:
                end = min(start + q_len + 1, seq.num_prompt_tokens)
                following = seq.tokens[start + 1 : end]
                out[at : at + len(following)] = following
                wanted = True
            at += q_len
        return wanted


def state_index(seq: Sequence) -> int:
    """The sampler-state entry of a running sequence."""
    if seq.state_index is None:
        raise RuntimeError(f"request {seq.request.request_id!r} was planned but is not running")
    return seq.state_index


def _sampling_row(row: PlannedRow) -> SamplingRow:
    seq = row.seq
    # The plan already counts the token that this row samples as output.
    return SamplingRow(
        params=seq.request.params,
        seed=seq.seed,
        state_index=state_index(seq),
        position=row.kv_len,
        samples=row.samples,
        num_output_tokens=seq.num_output_tokens - row.samples,
        num_logprobs=num_logprobs(seq),
    )


def num_logprobs(seq: Sequence) -> int:
    """The likeliest tokens wanted with each sampled one; 0: only its own log-probability; -1: not even that."""
    params, beam = seq.request.params, seq.group.beam
    if beam is not None:
        return beam.num_candidates
    if params.logprobs is None and params.num_sequences > params.n:
        return 0  # `best_of` ranks by them
    return -1 if params.logprobs is None else params.logprobs

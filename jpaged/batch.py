"""`StepPlan` -> one packed int32 array on the host -> `StepInputs` on the device.

All that a step needs to be told goes over in one transfer; `jpaged.packed_layout` says where in it each field lies.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Int32

from jpaged.config import StepShape
from jpaged.packed_layout import NUM_SAMPLING_FIELDS, NUM_STOP_IDS, packed_layout, packed_size
from jpaged.pallas_kernels import PagedMetadata
from jpaged.sampling_rows import (
    SamplingRow,
    SamplingRows,
    sampling_field,
    sampling_fields,
    unpack_sampling_rows,
)
from jpaged.sequence import Sequence
from jpaged.step_plan import StepPlan

MAX_IN_FLIGHT: Final = 4  # steps that were packed and have not ended, the one being packed included
_POSITION, _SAMPLES, _BANS_STOPS = map(sampling_field, ("position", "samples", "bans_stops"))


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What one step is told, on the device.

    Attributes:
      tokens: ids, or -1 - entry for the token that was sampled last for a state entry, which the device remembers.
      next_tokens: for prompt log-probabilities.
      source: index in [0, T) of the token that each row samples after: its last one, or, for a sequence that was just
        forked, that of its parent; for a row that guesses (`Drafts`) the one before its guesses, which follow as rows
        of their own that have no tokens to compute; 0 for padding rows.
      meta: for paged attention.
      sampling: parameters of each row.
      row_steps, stop_ids: as in the packed array; empty if there is one step.
    """

    tokens: Int32[Array, " T"]
    next_tokens: Int32[Array, " T"]
    source: Int32[Array, " S"]
    meta: PagedMetadata
    sampling: SamplingRows
    row_steps: Int32[Array, " rows"]
    stop_ids: Int32[Array, "rows ids"]


def unpack(packed: Int32[Array, " W"], shape: StepShape) -> StepInputs:
    """The device side of `BatchPacker.pack`; runs inside the jitted step."""
    field = {name: packed[where] for name, where in packed_layout(shape).items()}
    num_decode, num_seqs, _ = field["scalars"]
    return StepInputs(
        tokens=field["tokens"],
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
        row_steps=field["row_steps"],
        stop_ids=field["stop_ids"].reshape(-1, NUM_STOP_IDS),
    )


class _Buffer:
    """One packed array, and a view of each field."""

    def __init__(self, shape: StepShape) -> None:
        layout = packed_layout(shape)
        self.packed = np.zeros(packed_size(shape), np.int32)
        self.entries = np.zeros(shape.num_rows, np.int64)
        self.field = {name: self.packed[where] for name, where in layout.items()}
        self.page_table = self.field["page_table"].reshape(shape.num_rows, shape.pages_per_row)
        self.sampling = self.field["sampling"].reshape(NUM_SAMPLING_FIELDS, shape.num_rows)
        self.of_tokens = self.packed[: layout["page_table"].start]
        self.of_rows = self.packed[layout["page_table"].stop : layout["sampling"].start]


class BatchPacker:
    """Packs plans. Keeps what it was told of running sequences by state index, so that a row is a column of an array.

    Args:
      shapes: the shapes that a step may have, ascending.
      page_size: token slots a page.
      max_num_seqs: state entries; the null entry has this index.
    """

    def __init__(self, shapes: tuple[StepShape, ...], *, page_size: int, max_num_seqs: int):
        self._shapes = shapes
        self._page_size = page_size
        self._null_entry = max_num_seqs
        # By state entry, the null entry, which stands for padding, included. Of which version of a sequence's pages, of
        # which of its runs, and of how many pages the rest is known:
        self._known = np.full((max_num_seqs + 1, 3), -1, np.int64)
        self._page_table = np.zeros((max_num_seqs + 1, max(s.pages_per_row for s in shapes)), np.int32)
        self._sampling = np.repeat(sampling_fields([], 1, max_num_seqs), max_num_seqs + 1, axis=1)
        self._stop_ids = np.full((max_num_seqs + 1, NUM_STOP_IDS), -1, np.int32)
        self._ban_ends = np.zeros(max_num_seqs + 1, np.int64)  # where the output is as long as min_tokens
        self._wants_prompt = np.zeros(max_num_seqs + 1, bool)
        self._any_bans = self._any_wants_prompt = False
        self._buffers: dict[StepShape, deque[_Buffer]] = {}

    def _shape_for(self, plan: StepPlan, longest: int) -> StepShape:
        """The smallest shape that holds the plan, whose longest row has so many KV tokens."""
        pages = -(-longest // self._page_size)
        for shape in self._shapes:
            fits = shape.num_tokens >= plan.num_tokens and shape.num_rows >= plan.num_samples
            if fits and shape.num_steps == plan.num_steps and shape.pages_per_row >= pages:
                return shape
        raise RuntimeError(
            f"a plan of {plan.num_tokens} tokens, {plan.num_samples} rows and {pages} pages a row fits no step shape; "
            f"the largest is {self._shapes[-1]}"
        )

    def pack(self, plan: StepPlan) -> tuple[Int32[np.ndarray, " W"], StepShape]:
        """The packed array of a plan, padded to its shape.

        New memory of this size would cost more than filling it, so arrays come again: one is written anew by the
        `MAX_IN_FLIGHT`-th call after it, by when its step must have read it.
        """
        entries, starts, q_lens = plan.entries, plan.starts, plan.q_lens
        kv_lens = starts + q_lens
        in_the_end = kv_lens if plan.num_more is None else kv_lens + plan.num_more
        shape = self._shape_for(plan, int(in_the_end.max()))
        buffer = self._next_buffer(shape)
        field, num_seqs, num_tokens = buffer.field, plan.num_seqs, plan.num_tokens
        self._learn(plan, in_the_end)
        buffer.of_tokens.fill(0)
        buffer.of_rows.fill(0)

        num_rows = num_seqs
        if plan.num_decode == num_seqs:
            positions, entry_of_token, ends, sources = starts, entries, plan.sources + 1, plan.sources
        else:
            ends = np.cumsum(q_lens)
            sources = ends[plan.sources] - 1
            num_rows -= num_seqs - int(np.count_nonzero(q_lens))  # forks stand last; attention does not see them
            # Token i of the step is token i - (its row's first token) of that row.
            positions = np.repeat(starts - ends + q_lens, q_lens) + np.arange(num_tokens)
            entry_of_token = np.repeat(entries, q_lens)
        page_index, offset = np.divmod(positions, self._page_size)
        slots = self._page_table[entry_of_token, page_index] * self._page_size
        slots += offset

        self._write_tokens(plan, ends, field["tokens"])
        sampled_entries, sampled_positions, samples = entries, kv_lens, plan.samples
        if plan.drafts is not None:  # one more row of the sampler a guess, which samples after it
            rows, places, counts = plan.drafts.rows, plan.drafts.places, plan.drafts.counts
            sources -= counts[plan.sources]
            guesses = sources[rows] + 1 + places
            field["tokens"][guesses] = plan.drafts.tokens
            sources = np.concatenate((sources, guesses))
            sampled_entries = np.concatenate((entries, entries[rows]))
            sampled_positions = np.concatenate((plan.positions, plan.positions[rows] + 1 + places))
            samples = np.concatenate((samples, np.ones(len(rows), bool)))
        field["positions"][:num_tokens] = positions
        field["slots"][:num_tokens] = slots
        padded = buffer.entries
        padded.fill(self._null_entry)
        padded[:num_rows] = entries[:num_rows]
        if shape.pages_per_row == self._page_table.shape[1]:
            np.take(self._page_table, padded, axis=0, out=buffer.page_table, mode="clip")
        else:
            buffer.page_table[:] = self._page_table[padded, : shape.pages_per_row]
        field["kv_lens"][:num_rows] = kv_lens[:num_rows]
        cu_q_lens = field["cu_q_lens"]
        cu_q_lens[1 : num_seqs + 1] = ends
        cu_q_lens[num_seqs + 1 :] = num_tokens
        num_samples = len(sources)
        field["sources"][:num_samples] = sources
        if plan.num_more is not None:
            field["row_steps"][:num_seqs] = 1 + plan.num_more
            field["stop_ids"].reshape(-1, NUM_STOP_IDS)[:num_seqs] = self._stop_ids[entries]
        scalars = field["scalars"]
        scalars[0], scalars[1] = plan.num_decode, num_rows
        if self._any_wants_prompt and self._wants_prompt[entries].any():
            for seq, at, start, end in plan.prompt_spans():
                field["next_tokens"][at : at + end - start] = seq.tokens[start:end]
                scalars[2] = True
        padded[:num_samples] = sampled_entries
        sampling = np.take(self._sampling, padded, axis=1, out=buffer.sampling, mode="clip")
        sampling[_POSITION, :num_samples] = sampled_positions
        sampling[_SAMPLES, :num_samples] = samples
        if self._any_bans:
            sampling[_BANS_STOPS, :num_samples] = sampled_positions < self._ban_ends[sampled_entries]
        return buffer.packed, shape

    def _next_buffer(self, shape: StepShape) -> _Buffer:
        buffers = self._buffers.setdefault(shape, deque())
        if len(buffers) < MAX_IN_FLIGHT:
            buffers.append(_Buffer(shape))
        else:
            buffers.rotate(-1)
        return buffers[-1]

    def _learn(self, plan: StepPlan, kv_lens: np.ndarray) -> None:
        """Brings what is known of the rows' sequences up to date."""
        entries, num_pages = plan.entries, -(-kv_lens // self._page_size)
        known = self._known.take(entries, axis=0)
        changed = known[:, :2] != plan.versions
        if np.count_nonzero(changed):
            for row in np.flatnonzero(changed[:, 1]).tolist():
                self._begin(plan.seqs[row], int(entries[row]))
            replaced = entries[changed.any(axis=1)]
            self._page_table[replaced] = 0
            self._known[replaced, 2] = 0
            self._known[entries, :2] = plan.versions
            known = self._known.take(entries, axis=0)
        grown = known[:, 2] < num_pages
        if np.count_nonzero(grown):
            rows = np.flatnonzero(grown)
            starts, ends = known[rows, 2], num_pages[rows]
            if (ends - starts == 1).all():
                pages = [plan.seqs[row].pages[at] for row, at in zip(rows.tolist(), starts.tolist(), strict=True)]
                self._page_table[entries[rows], starts] = pages
            else:
                for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
                    self._page_table[entries[row], start:end] = plan.seqs[row].pages[start:end]
            self._known[entries[rows], 2] = ends

    def _begin(self, seq: Sequence, entry: int) -> None:
        """What does not change while a sequence runs."""
        params, num_top = seq.request.params, seq.num_logprobs
        row = SamplingRow(params, seq.seed, entry, 0, samples=False, num_output_tokens=0, num_logprobs=num_top)
        self._sampling[:, entry] = sampling_fields([row], 1, self._null_entry)[:, 0]
        stop_ids = sorted(seq.stop_ids)[:NUM_STOP_IDS]
        self._stop_ids[entry] = stop_ids + [-1] * (NUM_STOP_IDS - len(stop_ids))
        self._ban_ends[entry] = seq.num_prompt_tokens + params.min_tokens if params.bans_stops else 0
        self._wants_prompt[entry] = params.prompt_logprobs is not None
        self._any_bans, self._any_wants_prompt = bool(self._ban_ends.any()), bool(self._wants_prompt.any())

    def _write_tokens(self, plan: StepPlan, ends: np.ndarray, out: np.ndarray) -> None:
        """Tokens that a sequence began to run with, and the entries of those that were sampled since."""
        from_device = plan.from_device
        if np.count_nonzero(from_device) == plan.num_tokens:  # rows of one token, all of them
            out[: plan.num_tokens] = ~plan.entries  # -1 - entry
            return
        known = np.flatnonzero(~from_device | (plan.q_lens > 1)).tolist()
        starts, q_lens, at = plan.starts.tolist(), plan.q_lens.tolist(), ends.tolist()
        for row in known:
            tokens = plan.seqs[row].tokens[starts[row] : starts[row] + q_lens[row]]
            first = at[row] - q_lens[row]
            out[first : first + len(tokens)] = tokens
        out[ends[from_device] - 1] = ~plan.entries[from_device]

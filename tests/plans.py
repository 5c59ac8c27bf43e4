"""Plans that no scheduler made."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jpaged.step_plan import PlannedRow, StepPlan


def plan_of_rows(rows: Iterable[PlannedRow], **options: Any) -> StepPlan:
    """A plan of these rows, in the order of a plan, whose sequences have a state index and count them as computed.

    Args:
      rows: as above.
      **options: other fields.
    """
    rows = list(rows)
    seqs = [row.seq for row in rows]
    columns = [(row.start, row.num_tokens, row.source, row.seq.state_index) for row in rows]
    starts, q_lens, sources, entries = np.array(columns, np.int64).reshape(-1, 4).T
    return StepPlan(
        seqs,
        starts,
        q_lens,
        samples=np.array([row.samples for row in rows], bool),
        sources=sources,
        entries=entries,
        versions=np.array([(seq.pages_version, seq.run) for seq in seqs], np.int64).reshape(-1, 2),
        from_device=np.array([row.kv_len > row.seq.num_given_tokens for row in rows], bool),
        num_decode=int((q_lens == 1).sum()),
        num_tokens=int(q_lens.sum()),
        **options,
    )

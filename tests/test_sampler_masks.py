"""`sample` under masks."""

import numpy as np

from jpaged.request import SamplingParams
from jpaged.sampler_state import load_masks, make_sampler_state
from jpaged.token_mask import pack_mask
from tests.test_sampler import S, V, random_logits, row, sample_rows


def test_only_what_a_mask_allows_is_sampled():
    logits = random_logits(18, num_rows=4)
    logits[3, 5] = np.nan  # is seen although the mask forbids it
    allowed = [[7, 130], [0], [], [7]]
    state = load_masks(make_sampler_state(S, V), [(i, pack_mask(ids, V)) for i, ids in enumerate(allowed)])
    listed = {"allowed_token_ids": [1]}  # says that there is a mask; which one, the state does
    for params in (SamplingParams(temperature=0.0, **listed), SamplingParams(temperature=2.0, **listed)):
        for seed in range(9):
            rows = [row(params, seed=seed, state_index=i) for i in range(4)]
            rows.append(row(SamplingParams(temperature=0.0), state_index=0))  # uses none
            tokens = sample_rows(np.concatenate([logits, logits[:1]]), rows, state).tolist()
            assert tokens[0] in allowed[0]
            assert tokens[1:4] == [0, -1, -1]
            assert tokens[4] == logits[0].argmax()
            if params.greedy:
                assert tokens[0] == max(allowed[0], key=lambda token: logits[0, token])

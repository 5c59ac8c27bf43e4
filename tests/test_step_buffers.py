"""Arrays that steps lend to each other: each comes back after as many steps as may be in flight, and no sooner."""

import jax
import numpy as np

from jpaged.batch import MAX_IN_FLIGHT
from jpaged.config import StepShape
from jpaged.step_buffers import StepBuffers, forward_buffers, token_buffer

PLACE = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
TOKENS = token_buffer(2)
LOGITS = forward_buffers(StepShape(4, 2, 1), 8, 3, np.float32)[0]


def lend(buffers: StepBuffers, one) -> jax.Array:
    (array,) = buffers.take([one], PLACE)
    buffers.keep([one], [array])
    return array


def test_token_ids_come_back_once_no_step_in_flight_can_have_them():
    buffers = StepBuffers()
    buffers.prepare([TOKENS, LOGITS], PLACE)
    lent = [lend(buffers, TOKENS) for _ in range(2 * MAX_IN_FLIGHT)]
    assert len({id(array) for array in lent}) == MAX_IN_FLIGHT
    assert all(one is two for one, two in zip(lent, lent[MAX_IN_FLIGHT:], strict=False))
    assert lend(buffers, LOGITS) is lend(buffers, LOGITS)


def test_what_a_failed_step_lost_is_made_anew():
    buffers = StepBuffers()
    buffers.prepare([LOGITS], PLACE)
    (lost,) = buffers.take([LOGITS], PLACE)
    (other,) = buffers.take([LOGITS], PLACE)
    assert other is not lost
    assert (other.shape, other.dtype) == (LOGITS.shape, LOGITS.dtype)

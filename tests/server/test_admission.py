"""Places are given back before answers end; the server ends after them."""

import asyncio

import pytest

from jpaged.server.admission import Admission
from jpaged.server.api_error import ApiError
from jpaged.server.keys import ANYBODY


def test_a_place_that_was_left_is_free_and_its_answer_is_waited_for() -> None:
    async def main() -> None:
        admission = Admission(max_requests=1, max_requests_per_key=None)
        with admission.place(ANYBODY) as place:
            with pytest.raises(ApiError, match="too many requests"), admission.place(ANYBODY):
                pass
            place.leave()
            assert admission.num_sequences == 0
            with admission.place(ANYBODY):
                assert admission.num_sequences == 1
            waiting = asyncio.ensure_future(admission.wait_empty())
            await asyncio.sleep(0)
            assert not waiting.done()  # the end of an answer is still being sent
        await waiting

    asyncio.run(main())

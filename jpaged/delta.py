"""`Delta`: what a step added to one answer of a streaming request."""

from typing import NamedTuple

from jpaged.request import FinishReason, TokenLogprobs


class Delta(NamedTuple):
    """What became known of one answer. The deltas of an answer, joined, are its `Completion`.

    A tuple, since one is made for each token of each stream.

    Attributes:
      index: of the answer among those of its request.
      text: new text; "" while what was sampled may still become a stop string or is half a character.
      token_ids: new tokens; none, if the answer only ended.
      logprobs: one entry a token of `token_ids`, if asked for.
      finish_reason: "stop", "length", "abort" or "error" in the last delta of the answer, `None` before.
      stop_reason: the stop string or token id that ended it; `None` for the model's end-of-sequence id.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StreamStart(NamedTuple):
    """What is known of a streaming request when its first delta is.

    Attributes:
      request_id: of the request.
      num_cached_tokens: prompt tokens found in the prefix cache.
      prompt_logprobs: one entry a token of the prompt, `None` for its first token, if asked for.
    """

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


class StreamNews(NamedTuple):
    """What steps brought to the requests that stream deltas.

    Attributes:
      starts: requests that had no delta before.
      deltas: (request id, delta) in order.
    """

    starts: list[StreamStart]
    deltas: list[tuple[str, Delta]]

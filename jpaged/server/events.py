"""`EventWriter`: deltas -> server-sent events. What is the same in all events of a request is written once."""

from collections.abc import Sequence
from json.encoder import encode_basestring  # type: ignore[attr-defined]  # in C; leaves non-ASCII text as it is
from typing import Any, Final

from jpaged.delta import Delta
from jpaged.request import TokenLogprobs
from jpaged.server.answer import usage
from jpaged.server.api_error import ApiError, compact_json
from jpaged.server.generation_request import GenerationRequest
from jpaged.server.logprob_lists import ChoiceLogprobs
from jpaged.server.token_text import TokenTexts

DONE: Final = b"data: [DONE]\n\n"


class EventWriter:
    """Writes the events of one request.

    Args:
      request: what was asked for.
      texts: of tokens.
      answer_id, created, model: as they are called in the answer.

    Attributes:
      num_output_tokens: of all answers so far.
      num_cached_tokens: of all prompts; told by who reads the streams.
    """

    def __init__(
        self, request: GenerationRequest, texts: TokenTexts, *, answer_id: str, created: int, model: str
    ) -> None:
        self._request = request
        self._texts = texts
        self._chat = request.endpoint == "chat"
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = compact_json({"id": answer_id, "object": kind, "created": created, "model": model}).decode()
        self._head = f'data: {head[:-1]},"choices":['
        self._tail = ',"usage":null}\n\n' if request.include_usage and not request.continuous_usage else "}\n\n"
        self._is_plain = not (request.wants_logprobs or request.wants_token_ids or request.continuous_usage)
        # An event with text alone is these two with the text between them.
        before = '"delta":{"content":' if self._chat else '"text":'
        self._before = [
            f'{self._head}{{"index":{index},{before}' for index in range(len(request.prompts) * request.params.n)
        ]
        middle = "}," if self._chat else ","
        self._after = f'{middle}"logprobs":null,"finish_reason":null,"stop_reason":null}}]{self._tail}'
        self._logprobs = [ChoiceLogprobs(request, texts) for _ in self._before] if request.wants_logprobs else []
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._unfinished: set[int] = set()

    def opening(self, number: int, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> bytes:
        """What comes before the first text of the answers to one prompt; sent together with it.

        Args:
          number: of the prompt.
          prompt_logprobs: of the engine.
        """
        request, prompt, events = self._request, self._request.prompts[number], []
        for index in range(number * request.params.n, (number + 1) * request.params.n):
            self._unfinished.add(index)
            more: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if request.wants_token_ids else {}
            if self._chat:
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                events.append(self._event(choice | {"finish_reason": None}, more))
            elif request.echo or more:
                logprobs = None
                if request.wants_logprobs and request.echo:
                    self._logprobs[index].add_prompt(prompt.token_ids, prompt_logprobs or ())
                    logprobs = self._logprobs[index].take()
                choice = {"index": index, "text": prompt.text or "", "logprobs": logprobs}
                events.append(self._event(choice | {"finish_reason": None, "stop_reason": None} | more, {}))
        return b"".join(events)

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        """The events for deltas of the answers to one prompt, for one write.

        Args:
          number: of the prompt.
          deltas: in order.
        """
        first, plain, written = number * self._request.params.n, self._is_plain, []
        for delta in deltas:
            self.num_output_tokens += len(delta.token_ids)
            if plain and delta.finish_reason is None:
                if delta.text:  # else what came is still uncertain
                    written.append(f"{self._before[first + delta.index]}{encode_basestring(delta.text)}{self._after}")
            else:
                if delta.finish_reason is not None:
                    self._unfinished.discard(first + delta.index)
                written.append(self._whole_event(first + delta.index, delta).decode())
        return "".join(written).encode()

    def _whole_event(self, index: int, delta: Delta) -> bytes:
        logprobs = None
        if self._request.wants_logprobs:
            self._logprobs[index].add(delta.logprobs or ())
            logprobs = self._logprobs[index].take()
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        choice |= {"logprobs": logprobs, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._request.wants_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._event(choice, {})

    def _event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        tail = self._tail
        if self._request.continuous_usage:
            more = more | {"usage": self._usage()}
        if more:
            tail = f",{compact_json(more).decode()[1:-1]}{tail}"
        return f"{self._head}{compact_json(choice).decode()}]{tail}".encode()

    def ending(self) -> bytes:
        """What comes after the last text: usage, if asked for, and the end."""
        # A request that is aborted before its prompt is computed has one answer, whatever n is: the others end with it.
        last = b"".join(
            self._whole_event(index, Delta(index, "", (), None, "abort", None)) for index in sorted(self._unfinished)
        )
        if self._request.include_usage:
            last += f'{self._head}],"usage":{compact_json(self._usage()).decode()}}}\n\n'.encode()
        return last + DONE

    def _usage(self) -> dict[str, Any]:
        return usage(self._request.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)


def error_events(error: ApiError) -> bytes:
    """An error that comes when answers have begun, and the end."""
    return b"data: " + error.body() + b"\n\n" + DONE

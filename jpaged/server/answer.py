"""The answers that come whole: `Output`s -> the JSON object of a completion or of a chat."""

from collections.abc import Sequence
from typing import Any

from jpaged.request import Completion, Output
from jpaged.server.generation_request import GenerationRequest
from jpaged.server.logprob_lists import ChoiceLogprobs, prompt_logprob_list
from jpaged.server.token_text import TokenTexts


def whole_answer(
    request: GenerationRequest,
    outputs: Sequence[Output],
    texts: TokenTexts,
    *,
    answer_id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """The response object.

    Args:
      request: what was asked for.
      outputs: one a prompt, finished.
      texts: of tokens.
      answer_id, created, model: as they are called in the answer.
    """
    chat = request.endpoint == "chat"
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _choice(request, number, output, completion, texts)
            for number, output in enumerate(outputs)
            for completion in _all_answers(output, request.params.n)
        ],
        "usage": usage(
            request.num_prompt_tokens,
            sum(len(completion.token_ids) for output in outputs for completion in output.completions),
            sum(output.num_cached_tokens for output in outputs),
        ),
    }
    if chat:
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprob_list(
                outputs[0].prompt_logprobs or (), texts, top=request.prompt_logprobs
            )
        if request.wants_token_ids:
            answer["prompt_token_ids"] = request.prompts[0].token_ids
    return answer


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """The usage object.

    Example:
      >>> usage(5, 2, 0)["total_tokens"]
      7
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _all_answers(output: Output, n: int) -> Sequence[Completion]:
    """A request that is aborted before its prompt is computed has one answer, whatever n is: the others end with it."""
    if output.finish_reason != "abort":
        return output.completions  # a beam search may find fewer
    begun = {completion.index for completion in output.completions}
    return [
        *output.completions,
        *(Completion(index=i, text="", token_ids=(), finish_reason="abort") for i in range(n) if i not in begun),
    ]


def _choice(
    request: GenerationRequest, number: int, output: Output, completion: Completion, texts: TokenTexts
) -> dict[str, Any]:
    chat, prompt = request.endpoint == "chat", request.prompts[number]
    choice: dict[str, Any] = {"index": number * request.params.n + completion.index}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = (prompt.text or "") + completion.text if request.echo else completion.text
    logprobs = None
    if request.wants_logprobs:
        logprobs = ChoiceLogprobs(request, texts)
        if request.echo:
            logprobs.add_prompt(prompt.token_ids, output.prompt_logprobs or ())
        logprobs.add(completion.logprobs or ())
    choice["logprobs"] = logprobs.take() if logprobs else None
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    if not chat and request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprob_list(
            output.prompt_logprobs or (), texts, top=request.prompt_logprobs
        )
    if request.wants_token_ids:
        choice["token_ids"] = completion.token_ids
        if not chat:
            choice["prompt_token_ids"] = prompt.token_ids
    return choice

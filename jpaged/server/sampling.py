"""Parameters of a request -> `SamplingParams`."""

import re
from collections.abc import Container, Mapping
from typing import Any, Final

from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from jpaged.server.api_error import ApiError
from jpaged.structured import TOO_MANY_WAIT, StructuredOutput, is_refusal

# Those that have the same name and meaning in `SamplingParams`.
_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "seed",
    "stop_token_ids",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
)
_FIRST_NAME: Final = re.compile(r"\w+")
_FORM: Final = re.compile(r"^structured\b(?! outputs)")
_SCHEMA: Final = re.compile(r"^response_format\.json\b")


def sampling_params(
    values: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """How to sample.

    Args:
      values: of all parameters, as `read_parameters` gives them.
      max_tokens, logprobs, prompt_logprobs: which the endpoints call differently.

    Raises:
      ApiError: 400: parameters contradict each other.
    """
    given: dict[str, Any] = {name: values[name] for name in _SAME if values[name] is not None}
    if values["seed"] is not None:
        given["seed"] = values["seed"] % 2**63  # OpenAI's and vLLM's may be negative
    stop = values["stop"]
    if values["best_of"] is not None and values["best_of"] < values["n"]:
        raise ApiError(400, f"best_of is {values['best_of']}, expected at least n ({values['n']})", param="best_of")
    if values["use_beam_search"]:
        if values["stream"]:
            raise ApiError(400, "use_beam_search cannot stream: the answers are known at the end", param="stream")
        if values["temperature"] == 1.0:  # nobody who asks for beams means to sample
            given["temperature"] = 0.0
    elif values["stream"] and values["best_of"] not in (None, values["n"]):
        raise ApiError(400, "best_of cannot stream: which answers are given is known at the end", param="stream")
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        got = f"min_tokens is {values['min_tokens']}, expected at most max_tokens ({max_tokens})"
        raise ApiError(400, got, param="min_tokens")
    structured = _structured(values)
    try:
        return SamplingParams(
            **given,
            structured=structured,
            stop=(stop,) if isinstance(stop, str) else stop or (),
            logit_bias=values["logit_bias"] or {},
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except RequestError as error:
        raise refusal(error, values, form_name(values)) from None


def form_name(values: Mapping[str, Any]) -> str | None:
    """The parameter that says which form the output must have; `None`: it may have any."""
    if values["structured_outputs"] is not None:
        return "structured_outputs"
    wanted = values["response_format"]
    return "response_format" if wanted is not None and wanted["type"] != "text" else None


def refusal(error: RequestError, names: Container[str], form: str | None) -> ApiError:
    """What jpaged refuses, as the client is told.

    Args:
      error: its message begins with the name of a field of `SamplingParams`, or with "structured".
      names: of the endpoint's parameters.
      form: see `form_name`.

    Example:
      >>> refusal(RequestError("structured.regex is refused: unclosed group"), (), "structured_outputs").as_dict()
      {'error': {'message': 'structured_outputs.regex is refused: unclosed group', 'type': 'BadRequestError',
       'param': 'structured_outputs', 'code': 400}}
    """
    message = str(error)
    if form is not None and is_refusal(message):
        return ApiError(400, _SCHEMA.sub("response_format.json_schema.schema", _FORM.sub(form, message)), param=form)
    match = _FIRST_NAME.match(message)
    return ApiError(400, message, param=match[0] if match and match[0] in names else None)


def failure(error: str, form: str | None) -> ApiError:
    """What is told of a request that ended with "error".

    A form is compiled and followed after the request was taken. That it cannot be is 400 all the same: the same request
    would end in the same way, and OpenAI's clients send again what ended with 500.

    Args:
      error: of the `Output`.
      form: see `form_name`.
    """
    if error == TOO_MANY_WAIT:
        return ApiError(503, error, param=form, retry_after_s=1)
    if is_refusal(error):
        return refusal(RequestError(error), (), form)
    return ApiError(500, error)


def _structured(values: Mapping[str, Any]) -> StructuredOutput | None:
    own: dict[str, Any] | None = values["structured_outputs"]
    wanted: dict[str, Any] = values["response_format"] or {"type": "text"}
    kind = None if wanted["type"] == "text" else wanted["type"]
    if ("json_schema" in wanted) != (wanted["type"] == "json_schema"):
        expected = "json_schema with the type json_schema, and only there"
        raise ApiError(
            400, f"response_format has the type {wanted['type']}, expected {expected}", param="response_format"
        )
    if own is not None and kind is not None:
        raise ApiError(
            400, "structured_outputs and response_format are both given, expected one", param="structured_outputs"
        )
    try:
        if own is not None:
            return StructuredOutput(**own)
        if kind == "json_object":
            return StructuredOutput(json_object=True)
        return None if kind is None else StructuredOutput(json=wanted["json_schema"]["schema"])
    except RequestError as error:
        raise refusal(error, values, form_name(values)) from None

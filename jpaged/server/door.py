"""`Door`: the bytes of a request -> what it asks for, or a refusal. Parsing, checking, templating and tokenizing.

All of it is a pure function of the body and the model's tokenizer, so it can run in a thread or in another process.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from jpaged.errors import ChatTemplateError, RequestError
from jpaged.server.api_error import ApiError, compact_json, shown
from jpaged.server.generation_request import GenerationRequest, PromptTokens
from jpaged.server.parameters import (
    Endpoint,
    Limits,
    Table,
    chat_parameters,
    completion_parameters,
    detokenize_parameters,
    read_parameters,
    tokenize_parameters,
)
from jpaged.server.sampling import form_name, sampling_params
from jpaged.tokenizer import Tokenizer

# Tokens of prompts times likeliest tokens of each: what an answer may hold, and what may be written between two events.
_MAX_ENTRIES = 500_000
_MAX_STREAMED_ENTRIES = 50_000


class Door:
    """Reads requests. Safe to use from threads.

    Args:
      tokenizer: the model's; `None`: token ids only.
      limits: what the parameters' ranges depend on.

    Attributes:
      tables: the parameters of each endpoint.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self.tables: dict[Endpoint, Table] = {
            "completions": completion_parameters(limits),
            "chat": chat_parameters(limits),
            "tokenize": tokenize_parameters(limits),
            "detokenize": detokenize_parameters(limits),
        }
        # A text of more characters cannot fit into the context: refused before minutes are spent to tokenize it.
        self._max_characters = limits.max_model_len * (_longest_token(tokenizer) if tokenizer else 1)

    def read(self, endpoint: Endpoint, body: bytes) -> Any:
        """What a request asks for.

        Returns:
          "completions", "chat": a `GenerationRequest`; "tokenize", "detokenize": the answer, as the bytes of its JSON,
          since writing hundreds of thousands of ids takes long too.

        Raises:
          ApiError: it is refused.
        """
        readers: dict[Endpoint, Callable[[dict[str, Any]], Any]] = {
            "completions": self._completions,
            "chat": self._chat,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }
        values = read_parameters(parse_json(body), self.tables[endpoint])
        model = values["model"]
        if model is not None and model not in self._limits.models:
            served = ", ".join(self._limits.models)
            raise ApiError(404, f"there is no model {shown(model)}; this server has {served}", param="model")
        return readers[endpoint](values)

    def _completions(self, values: dict[str, Any]) -> GenerationRequest:
        echo, logprobs, prompt_logprobs = values["echo"], values["logprobs"], values["prompt_logprobs"]
        max_tokens = values["max_tokens"]
        if max_tokens == 0 and not echo and prompt_logprobs is None:
            raise ApiError(
                400, "max_tokens is 0, expected at least 1, or echo or prompt_logprobs to read", param="max_tokens"
            )
        asked = [number for number in (logprobs if echo else None, prompt_logprobs) if number is not None]
        params = sampling_params(
            values, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=max(asked, default=None)
        )
        prompts = []
        for index, prompt in enumerate(values["prompt"]):
            name = f"prompt[{index}]" if len(values["prompt"]) > 1 else "prompt"
            whole = (
                self._encode(
                    prompt, values["add_special_tokens"], name, truncated=bool(values["truncate_prompt_tokens"])
                )
                if isinstance(prompt, str)
                else tuple(prompt)
            )
            token_ids = self._fitted(whole, values, max_tokens, name)
            text = None
            if echo:
                unchanged = isinstance(prompt, str) and len(token_ids) == len(whole)
                text = prompt if unchanged else self._decode(token_ids, values["skip_special_tokens"])
            prompts.append(PromptTokens(token_ids=token_ids, text=text))
        return self._request("completions", values, params, prompts, echo=echo, wants_logprobs=logprobs is not None)

    def _chat(self, values: dict[str, Any]) -> GenerationRequest:
        both = values["max_tokens"], values["max_completion_tokens"]
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400, f"max_tokens is {both[0]} and max_completion_tokens {both[1]}, expected one", param="max_tokens"
            )
        max_tokens = both[0] if both[1] is None else both[1]
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError(400, "top_logprobs is given without logprobs, expected logprobs true", param="top_logprobs")
        params = sampling_params(
            values,
            max_tokens=max_tokens,
            logprobs=values["top_logprobs"] if values["logprobs"] else None,
            prompt_logprobs=values["prompt_logprobs"],
        )
        truncated = bool(values["truncate_prompt_tokens"])
        whole = self._encode(self._render(values), values["add_special_tokens"], "messages", truncated=truncated)
        prompt = PromptTokens(token_ids=self._fitted(whole, values, max_tokens, "messages"))
        return self._request("chat", values, params, [prompt], wants_logprobs=values["logprobs"])

    def _request(self, endpoint, values, params, prompts, *, wants_logprobs, echo=False) -> GenerationRequest:
        options = values["stream_options"]
        if options is not None and not values["stream"]:
            raise ApiError(400, "stream_options is given without stream, expected stream true", param="stream_options")
        if values["prompt_logprobs"] is not None and values["stream"]:
            raise ApiError(
                400, "prompt_logprobs cannot stream; with echo, logprobs has the prompt's too", param="prompt_logprobs"
            )
        if params.prompt_logprobs is not None:
            copies = params.n if echo else 1
            entries = sum(len(prompt.token_ids) for prompt in prompts) * (params.prompt_logprobs + 1) * copies
            limit = _MAX_STREAMED_ENTRIES if values["stream"] else _MAX_ENTRIES
            if entries > limit:
                raise ApiError(
                    400,
                    f"the log-probabilities of the prompts would be {entries} entries, expected at most {limit}; send "
                    "fewer prompts at once, or ask for fewer likeliest tokens",
                    param="prompt_logprobs" if values["prompt_logprobs"] is not None else "logprobs",
                )
        options = options or {}
        return GenerationRequest(
            endpoint=endpoint,
            prompts=tuple(prompts),
            params=params,
            stream=values["stream"],
            include_usage=options.get("include_usage", False),
            continuous_usage=options.get("continuous_usage_stats", False),
            echo=echo,
            wants_logprobs=wants_logprobs,
            prompt_logprobs=values["prompt_logprobs"],
            wants_token_ids=values["return_token_ids"],
            names_token_ids=values["return_tokens_as_token_ids"],
            form=form_name(values),
            name=values["request_id"],
            priority=values["priority"],
            cache_salt=values["cache_salt"],
        )

    def _tokenize(self, values: dict[str, Any]) -> bytes:
        if (values["prompt"] is None) == (values["messages"] is None):
            raise ApiError(400, "expected either prompt or messages", param="prompt")
        text, special = values["prompt"], values["add_special_tokens"]
        if text is None:
            text, special = self._render(values), bool(special)
        token_ids = self._encode(text, special is not False, "prompt")
        answer = {"count": len(token_ids), "max_model_len": self._limits.max_model_len, "tokens": token_ids}
        if values["return_token_strs"]:
            assert self._tokenizer is not None  # `_encode` had one
            answer["token_strs"] = [self._tokenizer.id_to_token(token) for token in token_ids]
        return compact_json(answer)

    def _detokenize(self, values: dict[str, Any]) -> bytes:
        return compact_json({"prompt": self._decode(values["tokens"], skip_special_tokens=False)})

    def _render(self, values: dict[str, Any]) -> str:
        """The conversation as the text that the model goes on with."""
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so no chat template", param="messages")
        if values["continue_final_message"] and values["add_generation_prompt"]:
            raise ApiError(
                400,
                "continue_final_message goes with add_generation_prompt false: an answer is begun or gone on with",
                param="continue_final_message",
            )
        variables = dict(values["chat_template_kwargs"] or {})
        reserved = {
            "messages",
            "tools",
            "chat_template",
            "add_generation_prompt",
            "continue_final_message",
            "documents",
        }
        for name in reserved.intersection(variables):
            raise ApiError(
                400, f"chat_template_kwargs has {name}, which is a parameter of its own", param="chat_template_kwargs"
            )
        if values["documents"] is not None:
            variables["documents"] = list(values["documents"])
        if values["tool_choice"] == "auto" and not values["tools"]:
            raise ApiError(400, "tool_choice is given without tools, expected some to choose from", param="tool_choice")
        shows_tools = values["tools"] and values["tool_choice"] != "none"
        try:
            return self._tokenizer.apply_chat_template(
                with_call_arguments(values["messages"]),
                add_generation_prompt=values["add_generation_prompt"],
                continue_final_message=values["continue_final_message"],
                tools=list(values["tools"]) if shows_tools else None,
                chat_template=values["chat_template"],
                **variables,
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        except RequestError as error:
            raise ApiError(400, str(error), param="chat_template_kwargs" if variables else "messages") from None
        except TypeError:  # the name of some other argument
            raise ApiError(
                400, "chat_template_kwargs has a name that cannot be used", param="chat_template_kwargs"
            ) from None

    def _encode(self, text: str, special: bool, name: str, *, truncated: bool = False) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; give token ids", param=name)
        if len(text) > self._max_characters and not truncated:
            raise ApiError(
                400,
                f"{name} has {len(text)} characters, which cannot fit into this model's maximum context length of "
                f"{self._limits.max_model_len} tokens; shorten it, or set truncate_prompt_tokens",
                param=name.partition("[")[0],
            )
        try:
            # `encode_batch` lets other threads run meanwhile, `encode` does not.
            token_ids = self._tokenizer.encode_batch([text], add_special_tokens=special)[0]
        except RequestError as error:
            raise ApiError(400, str(error), param=name.partition("[")[0]) from None
        if not token_ids and name != "prompt":
            raise ApiError(400, f"{name} is empty once it is tokenized", param=name.partition("[")[0])
        return tuple(token_ids)

    def _decode(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so there is no text to give")
        known = [token for token in token_ids if token < self._tokenizer.vocab_size]  # models pad their vocabulary
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def _fitted(
        self, token_ids: tuple[int, ...], values: Mapping[str, Any], max_tokens: int | None, name: str
    ) -> tuple[int, ...]:
        """The prompt, truncated if that is asked for; refused if it is too long."""
        limit, keep, param = self._limits.max_model_len, values["truncate_prompt_tokens"], name.partition("[")[0]
        output = 1 if max_tokens is None else max_tokens
        if keep == -1:
            keep = max(limit - output, 1)
        token_ids = token_ids if keep is None else token_ids[-keep:]
        if not token_ids:
            raise ApiError(400, f"{name} is empty once it is tokenized, expected at least one token", param=param)
        if len(token_ids) + output > limit:
            raise ApiError(
                400,
                f"this model's maximum context length is {limit} tokens, but {name} has {len(token_ids)} and the "
                f"answer is to have {'at least 1' if max_tokens is None else max_tokens}; shorten the prompt"
                + ("" if output <= 1 else ", or lower max_tokens"),
                param=param if len(token_ids) + min(output, 1) > limit else "max_tokens",
            )
        return token_ids


def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters that a token can stand for: byte-level vocabularies spell each byte by one."""
    longest = 1
    for token_id in range(tokenizer.vocab_size):
        with contextlib.suppress(RequestError):  # vocabularies have holes
            longest = max(longest, len(tokenizer.id_to_token(token_id)))
    return longest


def with_call_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose tool calls have their arguments as templates want them: clients send JSON, written as a string.

    Raises:
      ApiError: 400: it is none, or no object.

    Example:
      >>> call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
      >>> with_call_arguments([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"][0]["function"]
      {'name': 'f', 'arguments': {'a': 1}}
    """
    return [
        message | {"tool_calls": [_with_arguments(call, index) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _with_arguments(call: Any, index: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        read = parse_json(arguments.encode()) if arguments.strip() else {}
    except (ApiError, UnicodeEncodeError):
        read = None
    if not isinstance(read, dict):
        raise ApiError(
            400,
            f"messages[{index}].tool_calls has arguments that are no JSON object, written as text",
            param="messages",
        )
    return call | {"function": function | {"arguments": read}}


def parse_json(body: bytes) -> Any:
    """The JSON value of a body.

    Raises:
      ApiError: 400: it is none, or has NaN or Infinity in it.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(body.decode(), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8 at byte {error.start}, expected JSON in UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        # Of the decoder's own message the part before the place: it does not repeat the body.
        what = error.msg if isinstance(error, json.JSONDecodeError) else "a number that cannot be read"
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is no JSON: {what}{where}") from None

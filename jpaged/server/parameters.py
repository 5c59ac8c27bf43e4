"""The one table of request parameters: what each endpoint takes, of which kind, with which default, and what it means.

The checks, the OpenAPI document and docs/server.md's table are all made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from jpaged.server.api_error import MAX_PROBLEMS, ApiError, shown
from jpaged.server.kinds import (
    AnyObject,
    Boolean,
    Choice,
    Ignored,
    Integer,
    Kind,
    ListOf,
    Name,
    Neutral,
    Number,
    OneOf,
    Record,
    Refused,
    Text,
    TokenMap,
    nullable,
)
from jpaged.server.prompt_kinds import Messages, Prompt

Endpoint = Literal["completions", "chat", "tokenize", "detokenize"]

MAX_INT32: Final = 2**31 - 1
_SALT: Final = Text(1, 128, r"[^@/\\\x00]*", "a string without @, /, \\ and NUL")
_ID: Final = Text(1, 128, "[!-~]*", "printable ASCII characters without spaces")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the table depends on.

    Attributes:
      models: names that the model is served by; the first one is in the answers.
      vocab_size: token ids are in [0, vocab_size).
      max_model_len: tokens of prompt and output together.
      max_logprobs: entries of top-logprobs.
      max_n: answers to a prompt, and beams.
      max_prompts: prompts in one request.
      has_priorities: the engine serves by priority.
      trusts_templates: a request may bring its own chat template.
    """

    models: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_n: int
    max_prompts: int
    has_priorities: bool = False
    trusts_templates: bool = False


@dataclass(frozen=True)
class Parameter:
    """One parameter of an endpoint; null means the default.

    Attributes:
      kind: what it may be.
      about: what it means.
      default: what it is if it is not given.
      required: whether it must be given.
    """

    kind: Kind
    about: str
    default: Any = None
    required: bool = False

    def schema(self) -> dict[str, Any]:
        schema = self.kind.schema() if self.required else nullable(self.kind.schema())
        return {**schema, "description": self.about} | ({} if self.default is None else {"default": self.default})


Table = Mapping[str, Parameter]

# Fields that clients send for their own or the provider's book-keeping; no answer depends on them.
IGNORED: Final = {
    "user": "your own name of the end user",
    "metadata": "your own notes",
    "store": "whether the provider keeps the answer; nothing is kept here",
    "service_tier": "the provider's price list",
    "safety_identifier": "your own name of the end user",
    "prompt_cache_key": "a hint of which requests begin alike; the prefix cache finds that out itself",
    "prompt_cache_retention": "how long a provider keeps prefixes; here, until their pages are needed",
    "prompt_cache_options": "where a provider keeps prefixes, and how long; here, of all pages, until they are needed",
    "prediction": "a hint that could only make the answer come sooner",
}


def _model(limits: Limits) -> Parameter:
    return Parameter(Name(limits.models), "The model's name; the served one if left out.")


def _structured() -> dict[str, Parameter]:
    json_schema = Record(
        {"name": Text(1, 128), "description": Text(), "schema": AnyObject(), "strict": Boolean()}, required=("schema",)
    )
    return {
        "response_format": Parameter(
            Record(
                {"type": Choice(("text", "json_object", "json_schema")), "json_schema": json_schema}, required=("type",)
            ),
            "The form of the answer: any text, any JSON object, or JSON of a schema.",
        ),
        "structured_outputs": Parameter(
            Record(
                {
                    "json": OneOf((AnyObject(), Text(1)), "a JSON schema, as an object or as text"),
                    "json_object": Boolean(),
                    "regex": Text(1),
                    "choice": ListOf(Text(1), most=1024, least=1),
                    "grammar": Text(1),
                    "disable_any_whitespace": Boolean(),
                }
            ),
            "The form of the answer: exactly one of json, json_object, regex, choice and grammar.",
        ),
    }


def _sampling(limits: Limits) -> dict[str, Parameter]:
    token = Integer(0, limits.vocab_size - 1)
    stops = OneOf(
        (Text(1, 1024), ListOf(Text(1, 1024), most=64)), "a non-empty string, or a list of at most 64 of them"
    )
    priority = Integer(-(2**31), MAX_INT32) if limits.has_priorities else Integer(0, 0)
    return {
        "temperature": Parameter(Number(0, 2), "0 is greedy; else logits are divided by it.", 1.0),
        "top_p": Parameter(
            Number(0, 1, open_below=True), "Keep the likeliest tokens that reach this probability.", 1.0
        ),
        "top_k": Parameter(Integer(-1, MAX_INT32), "Keep the k likeliest tokens; 0 and -1 keep all.", 0),
        "min_p": Parameter(Number(0, 1), "Drop tokens less likely than this times the likeliest.", 0.0),
        "n": Parameter(Integer(1, limits.max_n), "Answers to each prompt; 1 if greedy.", 1),
        "best_of": Parameter(Integer(1, limits.max_n), "Answers to sample, of which the n likeliest are given; beams."),
        "use_beam_search": Parameter(Boolean(), "Search for the n likeliest answers; cannot stream.", False),
        "length_penalty": Parameter(Number(-100, 100), "A beam's log-probability is divided by length to it.", 1.0),
        "seed": Parameter(Integer(-(2**63), 2**63 - 1), "Same seed, same tokens, whatever runs beside."),
        "stop": Parameter(stops, "Strings that end an answer."),
        "stop_token_ids": Parameter(ListOf(token, most=64), "Token ids that end an answer."),
        "include_stop_str_in_output": Parameter(Boolean(), "Leave the stop string in the text.", False),
        "ignore_eos": Parameter(Boolean(), "Do not end at the model's end-of-sequence ids.", False),
        "min_tokens": Parameter(Integer(0, limits.max_model_len), "No end before so many output tokens.", 0),
        "presence_penalty": Parameter(Number(-2, 2), "Subtracted once for each token of the output.", 0.0),
        "frequency_penalty": Parameter(Number(-2, 2), "Subtracted for each occurrence in the output.", 0.0),
        "repetition_penalty": Parameter(Number(0.01, 100), "Above 1, tokens met before are less likely.", 1.0),
        "logit_bias": Parameter(
            TokenMap(Number(-100, 100), limits.vocab_size, most=300), "Token id to a value that is added to its logit."
        ),
        "prompt_logprobs": Parameter(
            Integer(0, limits.max_logprobs), "Log-probabilities of the prompt's tokens, with so many likeliest."
        ),
        "skip_special_tokens": Parameter(Boolean(), "Leave special tokens out of the text.", True),
        "truncate_prompt_tokens": Parameter(
            OneOf(
                (Integer(1, limits.max_model_len), Integer(-1, -1)), f"-1 or an integer in [1, {limits.max_model_len}]"
            ),
            "Keep the last so many tokens of the prompt; -1: what fits.",
        ),
        "stream": Parameter(Boolean(), "Send the answer as it grows, as server-sent events.", False),
        "stream_options": Parameter(
            Record({"include_usage": Boolean(), "continuous_usage_stats": Boolean(), "include_obfuscation": Ignored()}),
            "With stream: usage in a last event (include_usage), or in each (continuous_usage_stats).",
        ),
        "return_token_ids": Parameter(Boolean(), "Give the token ids of prompt and answers.", False),
        "return_tokens_as_token_ids": Parameter(Boolean(), 'Spell tokens in logprobs as "token_id:ID".', False),
        "priority": Parameter(priority, "Lower is served first, if the engine's policy is priority.", 0),
        "request_id": Parameter(_ID, "Becomes part of the answer's id; made up if left out."),
        "cache_salt": Parameter(_SALT, "Cached prefixes are shared with requests of the same salt only."),
        "spaces_between_special_tokens": Parameter(Neutral((True,), "special tokens are never joined"), "Not built."),
        "allowed_token_ids": Parameter(
            ListOf(token, most=limits.vocab_size, least=1), "Token ids that alone can be sampled; all, if left out."
        ),
        "bad_words": Parameter(Neutral(([],), "use logit_bias"), "Not built."),
        **{
            f"guided_{form}": Parameter(Neutral((), f"use structured_outputs.{form}"), "An older name.")
            for form in ("json", "regex", "choice", "grammar")
        },
        **{name: Parameter(Ignored(), f"Ignored: {about}.") for name, about in IGNORED.items()},
    }


def _template(limits: Limits) -> dict[str, Parameter]:
    function = Record({"name": Text(1, 256)}, required=("name",), is_open=True)
    tool = Record({"type": Choice(("function",)), "function": function}, required=("type", "function"), is_open=True)
    own = (
        Text(1, 2**20) if limits.trusts_templates else Neutral((), "this server trusts the model's own template alone")
    )
    return {
        "messages": Parameter(Messages(), "The conversation: objects with role and content.", required=True),
        "add_generation_prompt": Parameter(Boolean(), "End the prompt with the opening of an answer.", True),
        "continue_final_message": Parameter(Boolean(), "Go on with the final message instead.", False),
        "add_special_tokens": Parameter(Boolean(), "Add BOS and the like beside those of the template.", False),
        "chat_template": Parameter(own, "A template of the request's own (trust_request_chat_template)."),
        "chat_template_kwargs": Parameter(AnyObject(), "What else the template uses, such as enable_thinking."),
        "documents": Parameter(ListOf(AnyObject(), most=1024), "Handed to the template, if it uses documents."),
        "tools": Parameter(ListOf(tool, most=128), "Functions that the template shows to the model."),
        "tool_choice": Parameter(
            Choice(("none", "auto")),
            "none: tools are not shown. auto: they are; a call comes as the text of the answer.",
        ),
    }


def completion_parameters(limits: Limits) -> Table:
    """Of `/v1/completions`."""
    prompt = Prompt(vocab_size=limits.vocab_size, most=limits.max_prompts)
    return MappingProxyType(
        {
            "model": _model(limits),
            "prompt": Parameter(prompt, "Text or token ids, or a list of either.", required=True),
            "max_tokens": Parameter(
                Integer(0, MAX_INT32), "Output tokens at the most; 0 with echo or prompt_logprobs only.", 16
            ),
            "logprobs": Parameter(
                Integer(0, limits.max_logprobs), "Log-probabilities of the answer's tokens, with so many likeliest."
            ),
            "echo": Parameter(Boolean(), "Put the prompt before the answer, in text and logprobs.", False),
            "add_special_tokens": Parameter(Boolean(), "Add BOS and the like to prompts that are text.", True),
            **_sampling(limits),
            **_structured(),
            "suffix": Parameter(Neutral(("",), "the model only continues text", secret=True), "Not built."),
        }
    )


def chat_parameters(limits: Limits) -> Table:
    """Of `/v1/chat/completions`."""
    length = Integer(1, MAX_INT32)
    return MappingProxyType(
        {
            "model": _model(limits),
            **_template(limits),
            "max_completion_tokens": Parameter(length, "Output tokens at the most; what fits, if left out."),
            "max_tokens": Parameter(length, "The older name of max_completion_tokens."),
            "logprobs": Parameter(Boolean(), "Give log-probabilities of the answer's tokens.", False),
            "top_logprobs": Parameter(
                Integer(0, limits.max_logprobs), "With logprobs: also of so many likeliest tokens.", 0
            ),
            **_sampling(limits),
            **_structured(),
            "parallel_tool_calls": Parameter(Neutral((True,), "tool calls are not read from the text"), "Not built."),
            "functions": Parameter(Neutral(([],), "use tools"), "Not built."),
            "function_call": Parameter(Neutral(("none", "auto"), "use tools"), "Not built."),
            "modalities": Parameter(Neutral((["text"],), "this model writes text only"), "Not built."),
            "moderation": Parameter(Neutral((), "nothing is moderated here"), "Not built."),
            "audio": Parameter(Neutral((), "this model writes text only"), "Not built."),
            "web_search_options": Parameter(Neutral((), "there is no search"), "Not built."),
            "reasoning_effort": Parameter(
                Neutral((), "say it in chat_template_kwargs, in the words of the model's template"), "Not built."
            ),
            "verbosity": Parameter(Neutral((), "say it in the prompt"), "Not built."),
        }
    )


def tokenize_parameters(limits: Limits) -> Table:
    """Of `/tokenize`: a prompt, or messages."""
    chat = _template(limits)
    chat["messages"] = Parameter(Messages(), "A conversation, instead of a prompt.")
    chat["add_special_tokens"] = Parameter(Boolean(), "BOS and the like; true for a prompt, false for messages.")
    return MappingProxyType(
        {
            "model": _model(limits),
            "prompt": Parameter(Text(secret=True), "The text."),
            **chat,
            "return_token_strs": Parameter(Boolean(), "Give the tokens' spellings too.", False),
        }
    )


def detokenize_parameters(limits: Limits) -> Table:
    """Of `/detokenize`."""
    tokens = ListOf(Integer(0, limits.vocab_size - 1), most=2**20)
    return MappingProxyType(
        {
            "model": _model(limits),
            "tokens": Parameter(tokens, "Token ids.", required=True),
        }
    )


def read_parameters(body: Any, table: Table) -> dict[str, Any]:
    """The values of all parameters of a table, defaults filled in.

    Args:
      body: the request's JSON.

    Raises:
      ApiError: 400: unknown or wrong parameters; the message names at most ten, `param` the first.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}, expected a JSON object")
    problems: list[tuple[str, str]] = []
    values = {name: parameter.default for name, parameter in table.items()}
    for name, value in body.items():
        parameter = table.get(name)
        if parameter is None:
            problems.append((name, f"{shown(name)} is no parameter of this endpoint; leave it out"))
        elif value is not None:
            try:
                values[name] = parameter.kind.read(value)
            except Refused as error:
                problems.append((name, f"{name}{error.place} is {error.got}, expected {error.expected}"))
    for name, parameter in table.items():
        if parameter.required and body.get(name) is None:
            problems.append((name, f"{name} is missing; it is required"))
    if problems:
        more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
        message = "; ".join(problem for _, problem in problems[:MAX_PROBLEMS]) + more
        raise ApiError(400, message, param=problems[0][0][:128])
    return values

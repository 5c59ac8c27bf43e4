"""Options that several commands share, and what they make: `SamplingParams` and an `LLM`."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.model_bytes import check_weights
from jpaged.request import SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

WEIGHT_DTYPES: Final = ("float32", "bfloat16", "float16")

_SAMPLING: Final = "Sampling"
_ENGINE: Final = "Engine"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Known name, folder of safetensors or Orbax, .gguf file, Hugging Face id.")
]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer at the most.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy; at most 2.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens that reach this probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float, typer.Option(help="Drop tokens less likely than this times the likeliest.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same tokens, whatever runs beside.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.", rich_help_panel=_SAMPLING)
]
PageSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens a page; a multiple of 8. By default 16; 64 or 128 where the kernel for TPU runs.",
        rich_help_panel=_ENGINE,
    ),
]
NumPages = Annotated[
    int | None,
    typer.Option(help="Pages in the pool, the null page included; by default what fits.", rich_help_panel=_ENGINE),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that run at once.", rich_help_panel=_ENGINE)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Tokens of prompt and answer at the most; by default the model's.", rich_help_panel=_ENGINE),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of the weights; by default float32 on CPU, bfloat16 elsewhere.", rich_help_panel=_ENGINE),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="int8 or fp8: the layers' weights take a byte each; by default they are as --dtype says.",
        rich_help_panel=_ENGINE,
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep the pages of ended requests for prompts that begin alike.",
        rich_help_panel=_ENGINE,
    ),
]
HostPages = Annotated[
    int, typer.Option(help="Pages of host memory for requests that must make room.", rich_help_panel=_ENGINE)
]
SpeculativeTokens = Annotated[
    int,
    typer.Option(
        help="Tokens that are guessed ahead at the most, from the prompt and the answer so far; 0: none.",
        rich_help_panel=_ENGINE,
    ),
]
DecodeSteps = Annotated[
    int | None,
    typer.Option(
        help="Tokens that are decoded in one go while nobody waits; by default chosen by the device and the model.",
        rich_help_panel=_ENGINE,
    ),
]
Implementation = Annotated[
    str | None,
    typer.Option(help="Attention back end; by default chosen by the device.", rich_help_panel=_ENGINE),
]
Bars = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Progress bars; by default on a terminal only.", show_default=False),
]


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of every parameter whose default is a dataclass.

    A field's annotation says how its option looks, the default instance what it is when it is not given.

    Example:
      >>> @flattened
      ... def show(name: str, sampling: SamplingOptions = SamplingOptions(max_tokens=5)) -> None:
      ...     print(name, sampling.max_tokens, sampling.top_k)
      >>> show(name="a", **{field.name: getattr(SamplingOptions(max_tokens=7), field.name)
      ...                   for field in fields(SamplingOptions)})
      a 7 0
    """
    parameters, groups = [], {}
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.default
        if not is_dataclass(group) or isinstance(group, type):
            parameters.append(parameter)
            continue
        groups[parameter.name] = type(group)
        parameters += [
            parameter.replace(name=field.name, annotation=field.type, default=getattr(group, field.name))
            for field in fields(group)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    # What typer reads.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers are sampled, as it was asked for on the command line. Fields as in `SamplingParams`."""

    max_tokens: MaxTokens
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None
    stop: Stop = None

    def params(self, **others: Any) -> SamplingParams:
        """The parameters of a request; `others` are those of `SamplingParams` that have no option here.

        Raises:
          RequestError: an option is out of range.
        """
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.max_tokens < 1:  # `SamplingParams` takes 0, which only computes the prompt
            raise RequestError(f"max_tokens is {self.max_tokens}, expected an integer of at least 1")
        given["stop"] = [checked_text(text, "--stop") for text in self.stop or ()]
        return SamplingParams(**given | others)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine as it was asked for on the command line. Fields as in `CacheConfig` and `SchedulerConfig`."""

    page_size: PageSize = None
    num_pages: NumPages = None
    max_model_len: MaxModelLen = None
    dtype: Dtype = None
    weights: Weights = None
    implementation: Implementation = None
    prefix_cache: PrefixCache = True
    host_pages: HostPages = 0
    speculative_tokens: SpeculativeTokens = 0
    decode_steps: DecodeSteps = None

    def config(self, *, max_num_seqs: int = 32, token_buckets: tuple[int, ...] | None = None) -> EngineConfig:
        """The engine's config.

        Args:
          max_num_seqs: see `SchedulerConfig`.
          token_buckets: see `EngineConfig`.

        Raises:
          ConfigError: an option is out of range.
        """
        if self.dtype not in (None, *WEIGHT_DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}, expected one of {', '.join(WEIGHT_DTYPES)}")
        check_weights(self.weights)
        budget = max(SchedulerConfig.max_num_batched_tokens, max_num_seqs)
        return EngineConfig(
            cache=CacheConfig(
                page_size=self.page_size,
                num_pages=self.num_pages,
                prefix_cache=self.prefix_cache,
                host_pages=self.host_pages,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=self.max_model_len,
                preemption="swap" if self.host_pages else "auto",
            ),
            token_buckets=token_buckets,
            speculation=speculation_of(self.speculative_tokens),
            decode_steps=self.decode_steps,
            implementation=self.implementation,  # type: ignore  # any text: `EngineConfig` checks it
        )

    def load(
        self, model: str, *, max_num_seqs: int, progress: bool | None, token_buckets: tuple[int, ...] | None = None
    ) -> "LLM":
        """Fetches and loads the model; wrong options are refused before."""
        config = self.config(max_num_seqs=max_num_seqs, token_buckets=token_buckets)
        from jpaged.llm import LLM

        return LLM(model, dtype=self.dtype, weights=self.weights, config=config, progress=progress)


ENGINE_DEFAULTS: Final = EngineOptions()


def speculation_of(num_tokens: int) -> SpeculationConfig | None:
    """What `--speculative-tokens` says.

    Raises:
      ConfigError: it is negative.
    """
    if num_tokens < 0:
        raise ConfigError(f"speculative_tokens is {num_tokens}, expected an integer of at least 0")
    return SpeculationConfig(num_tokens=num_tokens) if num_tokens else None


def checked_text(text: str, what: str) -> str:
    """Text from the outside, refused if its bytes were no UTF-8 (Python keeps such bytes as lone surrogates).

    Example:
      >>> checked_text("caf\\udce9", "the prompt")
      Traceback (most recent call last):
      ...
      jpaged.errors.RequestError: the prompt is not valid UTF-8 at character 3
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid UTF-8 at character {error.start}") from None
    return text


def printable(text: str) -> str:
    """Text that a model wrote, made safe for a terminal: control characters could move its cursor or worse.

    Example:
      >>> printable("a\\tb\\x1b[2J\\n")
      'a\\tb\\ufffd[2J\\n'
    """
    return "".join(c if c.isprintable() or c in "\t\n" or ord(c) > 159 else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_answer(text: str) -> None:
    """Writes a model's text to the output stream at once: as it is into a pipe, `printable` on a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

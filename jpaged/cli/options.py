"""Options that several commands share, and what they make: `SamplingParams` and an `LLM`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.errors import ConfigError, RequestError

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
PageSize = Annotated[int, typer.Option(help="Tokens a page; a multiple of 8.", rich_help_panel=_ENGINE)]
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
Implementation = Annotated[
    str | None,
    typer.Option(help="Attention back end; by default chosen by the device.", rich_help_panel=_ENGINE),
]
Bars = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Progress bars; by default on a terminal only.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine as it was asked for on the command line. Fields as in `CacheConfig` and `SchedulerConfig`."""

    model: str
    dtype: str | None
    page_size: int
    num_pages: int | None
    max_num_seqs: int
    max_model_len: int | None
    implementation: str | None

    def config(self, *, token_buckets: tuple[int, ...] | None = None) -> EngineConfig:
        """The engine's config.

        Args:
          token_buckets: see `EngineConfig`.

        Raises:
          ConfigError: an option is out of range.
        """
        if self.dtype not in (None, *WEIGHT_DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}, expected one of {', '.join(WEIGHT_DTYPES)}")
        budget = max(SchedulerConfig.max_num_batched_tokens, self.max_num_seqs)
        return EngineConfig(
            cache=CacheConfig(page_size=self.page_size, num_pages=self.num_pages),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=budget, max_model_len=self.max_model_len
            ),
            token_buckets=token_buckets,
            implementation=self.implementation,  # type: ignore  # any text: `EngineConfig` checks it
        )

    def load(self, *, progress: bool | None, token_buckets: tuple[int, ...] | None = None) -> "LLM":
        """Fetches and loads the model; wrong options are refused before."""
        config = self.config(token_buckets=token_buckets)
        from jpaged.llm import LLM

        return LLM(self.model, dtype=self.dtype, config=config, progress=progress)


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

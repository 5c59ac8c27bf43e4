"""`parse_lengths`: the lengths of a workload from a few words, as commands and scripts take them. Imports no jax."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths, fixed_lengths, log_normal_lengths
from jpaged.trace_file import read_histogram, read_trace

FORMS: Final = (
    "fixed:PROMPT+OUTPUT, hist:FILE or hist:PROMPT,OUTPUT,WEIGHT;..., trace:FILE, or "
    "lognormal:PROMPT_MEAN+OUTPUT_MEAN[,sigma=X][,count=N][,seed=N]; each may end in ,first_turns ,max_prompt=N "
    ",max_total=N ,min_output=N"
)
_SELECTING: Final = ("first_turns", "max_prompt", "max_total", "min_output")
_DRAWING: Final = ("sigma", "count", "seed")
_OPTION: Final = re.compile(rf",({'|'.join((*_SELECTING, *_DRAWING))})(?:=([^,=]*))?$")
_NUMBER: Final = r"\d{1,10}(?:\.\d{1,10})?"
_INLINE_ROWS: Final = re.compile(rf"\d+,\d+(,{_NUMBER})?(;\d+,\d+(,{_NUMBER})?)*;?", re.ASCII)


def parse_lengths(text: str) -> Lengths:
    """The lengths that a few words describe, as the command line takes them.

    Args:
      text: one of
        "fixed:1000+200", or "1000+200" alone: all requests alike;
        "hist:FILE" or "hist:1000,200,3;50,10,1": rows of prompt tokens, output tokens and weight;
        "trace:FILE": a trace, see `read_trace`;
        "lognormal:161+338,sigma=1.0,count=10000,seed=0": see `log_normal_lengths`.
        Each may end in ",first_turns", ",max_prompt=N", ",max_total=N" and ",min_output=N", see `Lengths.select`.

    Raises:
      ConfigError: another text, or a file that cannot be read; the message names the file and its line.

    Example:
      >>> parse_lengths("fixed:1000+200").total_tokens.tolist()
      [1200]
      >>> parse_lengths("normal:3")
      Traceback (most recent call last):
      ...
      jpaged.errors.ConfigError: lengths are 'normal:3', expected fixed:PROMPT+OUTPUT, ...
    """
    base, options = text, {}
    while match := _OPTION.search(base):
        name, value = match.groups()
        if name in options:
            raise ConfigError(f"lengths are {text!r}, which has {name} twice")
        options, base = {name: _option(text, name, value)} | options, base[: match.start()]
    kind, colon, rest = base.partition(":")
    drawing = {name: options.pop(name) for name in _DRAWING if name in options}
    if drawing and kind != "lognormal":
        raise ConfigError(f"lengths are {text!r}, but {', '.join(drawing)} belongs to lognormal alone")
    two_numbers = re.fullmatch(rf"({_NUMBER})\+({_NUMBER})", rest if colon else base, re.ASCII)
    readers: dict[str, Callable[[str], Lengths]] = {"trace": read_trace, "hist": read_histogram}
    if two_numbers and kind == "lognormal":
        lengths = log_normal_lengths(float(two_numbers[1]), float(two_numbers[2]), **drawing)
    elif two_numbers and (kind == "fixed" or not colon) and "." not in base:
        lengths = fixed_lengths(int(two_numbers[1]), int(two_numbers[2]))
    elif kind == "hist" and _INLINE_ROWS.fullmatch(rest):
        lengths = read_histogram(rest.rstrip(";").split(";"))
    elif kind in readers and rest:
        lengths = readers[kind](str(Path(rest).expanduser()))
    else:
        raise ConfigError(f"lengths are {text!r}, expected {FORMS}")
    if not options:
        return lengths
    selection = ", ".join(name if value is True else f"{name}={value}" for name, value in options.items())
    return replace(lengths.select(**options), source=f"{lengths.source} ({selection})")


def _option(text: str, name: str, value: str | None) -> Any:
    if name == "first_turns":
        if value is not None:
            raise ConfigError(f"lengths are {text!r}, but first_turns takes no value")
        return True
    if not re.fullmatch(_NUMBER if name == "sigma" else r"\d{1,10}", value or "", re.ASCII):
        raise ConfigError(f"lengths are {text!r}, but {name} is {value!r}, expected a number")
    return float(value or 0) if name == "sigma" else int(value or 0)

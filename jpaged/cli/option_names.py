"""Errors name the fields of configs; whoever typed a command knows its options."""

import re
from collections.abc import Iterable, Mapping
from typing import Any


def flags_of(parameters: Iterable[Any]) -> dict[str, str]:
    """The long form of each option by the name of its parameter, which is that of the field it sets.

    Args:
      parameters: of a command of click.
    """
    flags = {}
    for parameter in parameters:
        long = [flag for flag in parameter.opts if flag.startswith("--")]
        if long:
            flags[parameter.name] = long[0]
    return flags


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message in which options stand for the fields that have one.

    A field without an underscore may be a plain word, so it counts at the beginning alone, where errors name it. What
    stands in quotes, or is part of a path, is somebody's text.

    Example:
      >>> flags = {"max_num_seqs": "--max-num-seqs", "port": "--port", "host": "--host"}
      >>> with_flags("max_num_seqs is 0, expected an integer of at least 1", flags)
      '--max-num-seqs is 0, expected an integer of at least 1'
      >>> with_flags("host is 'max_num_seqs', port is free", flags)
      "--host is 'max_num_seqs', port is free"
    """

    def flag(match: re.Match[str]) -> str:
        name = match[0]
        is_field = "_" in name or match.start() == 0
        return flags[name] if is_field and name in flags else name

    return re.sub(r"(?<![\w./'\"=-])\w+(?![\w/'\"=-])", flag, message)

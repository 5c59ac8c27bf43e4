"""Readers of the files that `Lengths` come from: public traces, and histograms. Imports no jax.

Files may be compressed by gzip, whatever they are called. What a trace is, its first line tells:

    TIMESTAMP,ContextTokens,GeneratedTokens              CSV of the Azure LLM inference traces
    num_prefill_tokens,num_decode_tokens,...             CSV of ShareGPT lengths: each row is a turn of a conversation,
                                                         its prefill all that was said before; no times
    {"timestamp": 0, "input_length": 6758, ...}          JSON lines of the Mooncake traces: milliseconds, and the ids of
                                                         the prompt's blocks of 512 tokens
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from jpaged.errors import ConfigError
from jpaged.lengths import MAX_TOKENS, Lengths

MOONCAKE_TOKENS_PER_HASH_ID: Final = 512
_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SHAREGPT: Final = ("num_prefill_tokens", "num_decode_tokens")
_MOONCAKE: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_GZIP_MAGIC: Final = b"\x1f\x8b"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# A line of a file: its number, from 1, and its text.
Line = tuple[int, str]


def read_trace(path: str | Path) -> Lengths:
    """The requests of a trace file, in order of arrival where it has times.

    Args:
      path: a file of one of the three formats above, plain or compressed by gzip.

    Raises:
      ConfigError: it cannot be read, is of another format, or a line is wrong; the message names file and line.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder) / "trace.csv"
      ...     _ = path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\\n"
      ...                         "2023-11-16 18:15:46.68,374,44\\n2023-11-16 18:15:50.93,396,109\\n")
      ...     lengths = read_trace(path)
      >>> lengths.prompt_tokens.tolist(), lengths.arrival_s.tolist()
      ([374, 396], [0.0, 4.25])
    """
    lines = _lines(path)
    number, first = next(lines, (1, ""))
    if first.startswith("{"):
        return _mooncake(path, lines, (number, first))
    columns = _cells(first)
    for names, read in ((_AZURE, _azure), (_SHAREGPT, _sharegpt)):
        if set(names) <= set(columns):
            return read(path, columns, lines)
    _refuse(
        path,
        number,
        f"{first!r:.80}",
        f"{','.join(_AZURE)} (Azure), {','.join(_SHAREGPT)},... (ShareGPT lengths), or a JSON object with "
        f"{', '.join(_MOONCAKE)} (Mooncake)",
    )


def read_histogram(source: str | Path | Iterable[str]) -> Lengths:
    """Requests by how often they come.

    Args:
      source: a file, or its lines: prompt tokens, output tokens, and a weight of at least 0 (1 where it is left out).
        Blank lines, lines that begin with #, and a first line of column names are passed over.

    Raises:
      ConfigError: it cannot be read, or a line is wrong; the message names file and line.

    Example:
      >>> lengths = read_histogram(["1000,200,3", "50,10"])
      >>> lengths.prompt_tokens.tolist(), lengths.weights.tolist(), lengths.mean_prompt_tokens
      ([1000, 50], [3.0, 1.0], 762.5)
    """
    is_file = isinstance(source, str | Path)
    name = str(source) if is_file else "the histogram"
    rows: list[tuple[int, int, float]] = []
    for number, line in _lines(source) if is_file else enumerate(source, 1):
        cells = _cells(line)
        if line.startswith("#") or (not rows and cells[0].isidentifier()):
            continue
        if len(cells) not in (2, 3):
            _refuse(name, number, f"{line!r:.80}", "prompt tokens, output tokens, weight")
        weight = _number(name, number, "the weight", cells[2]) if len(cells) == 3 else 1.0
        prompt = _tokens(name, number, "prompt tokens", cells[0], least=1)
        row = (prompt, _tokens(name, number, "output tokens", cells[1]), weight)
        if weight > 0:
            rows.append(row)
    prompts, outputs, weights = zip(*rows, strict=True) if rows else ((), (), ())
    return Lengths(
        source=Path(name).name if is_file else name,
        prompt_tokens=np.array(prompts, np.int64),
        output_tokens=np.array(outputs, np.int64),
        weights=np.array(weights, float),
    )


def _azure(path: str | Path, columns: list[str], lines: Iterator[Line]) -> Lengths:
    rows = []
    for number, when, prompt, output in _rows(path, columns, _AZURE, lines):
        try:
            time = datetime.fromisoformat(when)
        except ValueError:
            _refuse(path, number, f"TIMESTAMP {when!r:.40}", "a time such as 2023-11-16 18:15:46.680590")
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        rows.append(
            (
                (time - _EPOCH) // timedelta(microseconds=1),
                _tokens(path, number, "ContextTokens", prompt, least=1),
                _tokens(path, number, "GeneratedTokens", output),
            )
        )
    return _by_arrival(path, rows, ticks_per_s=1_000_000)


def _sharegpt(path: str | Path, columns: list[str], lines: Iterator[Line]) -> Lengths:
    prompts, outputs = [], []
    for number, prompt, output in _rows(path, columns, _SHAREGPT, lines):
        prompts.append(_tokens(path, number, _SHAREGPT[0], prompt, least=1))
        outputs.append(_tokens(path, number, _SHAREGPT[1], output))
    prompt_tokens = np.array(prompts, np.int64)
    return Lengths(
        source=Path(path).name,
        prompt_tokens=prompt_tokens,
        output_tokens=np.array(outputs, np.int64),
        # What was said before grows from turn to turn; where it does not, another conversation begins.
        conversation_ids=np.cumsum(np.diff(prompt_tokens, prepend=0) <= 0),
    )


def _mooncake(path: str | Path, lines: Iterator[Line], first: Line) -> Lengths:
    rows = []
    for number, line in (first, *lines):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or any(name not in row for name in _MOONCAKE):
            _refuse(path, number, f"{line!r:.80}", f"a JSON object with {', '.join(_MOONCAKE)}")
        prompt = _tokens(path, number, "input_length", row["input_length"], least=1)
        ids, needed = row["hash_ids"], -(-prompt // MOONCAKE_TOKENS_PER_HASH_ID)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
            _refuse(path, number, f"hash_ids {ids!r:.40}", "a list of integers of at least 0")
        if len(ids) != needed:
            expected = f"{needed}, one for each {MOONCAKE_TOKENS_PER_HASH_ID} tokens of the prompt"
            _refuse(path, number, f"{len(ids)} hash_ids for {prompt} tokens", expected)
        output = _tokens(path, number, "output_length", row["output_length"])
        milliseconds = _number(path, number, "timestamp", row["timestamp"])
        rows.append((milliseconds, prompt, output, tuple(ids)))
    return _by_arrival(path, rows, ticks_per_s=1000, tokens_per_hash_id=MOONCAKE_TOKENS_PER_HASH_ID)


def _by_arrival(path: str | Path, rows: list[Any], *, ticks_per_s: int, **more: Any) -> Lengths:
    """Lengths of rows of (ticks of a clock, prompt tokens, output tokens, perhaps hash ids)."""
    rows.sort(key=lambda row: row[0])
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    ticks = np.array(columns[0], float)
    return Lengths(
        source=Path(path).name,
        prompt_tokens=np.array(columns[1], np.int64),
        output_tokens=np.array(columns[2], np.int64),
        arrival_s=(ticks - ticks[:1]) / ticks_per_s,
        hash_ids=columns[3] if len(columns) > 3 else None,
        **more,
    )


def _lines(path: str | Path) -> Iterator[Line]:
    """The lines that are not blank.

    Raises:
      ConfigError: the file cannot be read.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else open(path, encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if line := line.strip():
                    yield number, line
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected a file of request lengths") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, after line {number}: not UTF-8 text ({error.reason})") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}, after line {number}: cannot be read: {reason}") from error


def _rows(
    path: str | Path, columns: list[str], names: tuple[str, ...], lines: Iterator[Line]
) -> Iterator[tuple[Any, ...]]:
    """Line number and the named cells of each line."""
    indices = [columns.index(name) for name in names]
    for number, line in lines:
        cells = _cells(line)
        if len(cells) != len(columns):
            _refuse(path, number, f"{len(cells)} columns in {line!r:.60}", f"{len(columns)}, as in the first line")
        yield number, *(cells[index] for index in indices)


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _tokens(path: str | Path, number: int, what: str, value: Any, *, least: int = 0) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        _refuse(path, number, f"{what} {value!r:.40}", f"an integer of {least} to {MAX_TOKENS}")
    return value


def _number(path: str | Path, number: int, what: str, value: Any) -> float:
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not 0 <= result < 1e15:
        _refuse(path, number, f"{what} {value!r:.40}", "a number of at least 0")
    return result


def _refuse(path: str | Path, number: int, got: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}, line {number}: {got}; expected {expected}")

"""`Lengths`: how long the prompts and outputs of a workload are. Imports no jax."""

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from jpaged.errors import ConfigError

MAX_TOKENS: Final = 10**9  # sums over a life, of the order of its square, then stay below 2**63


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """The requests of a workload, one a row: in order of arrival where the source has times, else in its order.

    Attributes:
      source: where they are from, in words.
      prompt_tokens: i64[n], tokens of the prompt, at least 1.
      output_tokens: i64[n], tokens that are generated; may be 0.
      weights: f64[n], how often such a request comes, relative to the others; above 0. `None`: all alike.
      arrival_s: f64[n], seconds since the first arrival, ascending, or `None`.
      hash_ids: for each request the ids of the prompt's prefix blocks of `tokens_per_hash_id` tokens, the last of them
        perhaps not full, or `None`. Equal ids are equal tokens behind equal tokens.
      tokens_per_hash_id: tokens that an id of `hash_ids` stands for, or `None`.
      conversation_ids: i64[n], the conversation of which the request is a turn, from 0; or `None`. The prompt of a turn
        holds all turns before it.

    Raises:
      ConfigError: no rows, columns of different sizes, or a value out of range.

    Example:
      >>> lengths = Lengths(source="two requests", prompt_tokens=[100, 300], output_tokens=[20, 40])
      >>> len(lengths), lengths.total_tokens.tolist(), lengths.mean_prompt_tokens
      (2, [120, 340], 200.0)
    """

    source: str
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    weights: np.ndarray | None = None
    arrival_s: np.ndarray | None = None
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    tokens_per_hash_id: int | None = None
    conversation_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        columns = {"prompt_tokens": np.int64, "output_tokens": np.int64, "weights": float, "arrival_s": float}
        for name, dtype in (columns | {"conversation_ids": np.int64}).items():
            if (given := getattr(self, name)) is not None:
                try:
                    column = np.array(given, dtype)
                except (TypeError, ValueError, OverflowError) as error:
                    raise ConfigError(f"{name} of {self.source} are no numbers of 64 bits: {error}") from error
                column.setflags(write=False)
                object.__setattr__(self, name, column)
                if column.shape != self.prompt_tokens.shape or column.ndim != 1:
                    raise ConfigError(
                        f"{name} of {self.source} has shape {column.shape}, prompt_tokens {self.prompt_tokens.shape}; "
                        "expected one row a request"
                    )
        if len(self) == 0:
            raise ConfigError(f"{self.source} holds no requests; expected at least one")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 0)):
            column = getattr(self, name)
            if column.min() < least or column.max() > MAX_TOKENS:
                raise ConfigError(
                    f"{name} of {self.source} are {column.min()} to {column.max()}, expected {least} to {MAX_TOKENS}"
                )
        if self.weights is not None and not (np.isfinite(self.weights).all() and self.weights.min() > 0):
            raise ConfigError(
                f"weights of {self.source} begin at {self.weights.min()}, expected finite numbers above 0"
            )
        if (self.hash_ids is None) != (self.tokens_per_hash_id is None):
            raise ConfigError(f"{self.source} has one of hash_ids and tokens_per_hash_id, expected both or neither")
        if self.hash_ids is not None and len(self.hash_ids) != len(self):
            raise ConfigError(f"{self.source} has {len(self.hash_ids)} lists of hash_ids for {len(self)} requests")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def total_tokens(self) -> np.ndarray:
        """Prompt and output together, i64[n]."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_prompt_tokens(self) -> float:
        return float(np.average(self.prompt_tokens, weights=self.weights))

    @property
    def mean_output_tokens(self) -> float:
        return float(np.average(self.output_tokens, weights=self.weights))

    def where(self, mask: np.ndarray) -> "Lengths":
        """The requests at which the mask bool[n] is true.

        Raises:
          ConfigError: there are none.
        """
        kept = np.flatnonzero(mask)
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, column in columns.items():
            if isinstance(column, np.ndarray):
                columns[name] = column[kept]
            elif name == "hash_ids" and column is not None:
                columns[name] = tuple(column[i] for i in kept)
        if not len(kept):
            raise ConfigError(f"none of the {len(self)} requests of {self.source} is left; ask for less")
        return Lengths(**columns)

    def select(
        self,
        *,
        first_turns: bool = False,
        max_prompt: int | None = None,
        max_total: int | None = None,
        min_output: int = 0,
    ) -> "Lengths":
        """The requests within bounds.

        Args:
          first_turns: of a conversation only the first turn.
          max_prompt: tokens of the prompt at the most.
          max_total: tokens of prompt and output at the most.
          min_output: tokens of the output at least.

        Raises:
          ConfigError: none is left, or `first_turns` of a source that knows no conversations.

        Example:
          >>> lengths = Lengths(source="two requests", prompt_tokens=[100, 300], output_tokens=[20, 40])
          >>> lengths.select(max_total=200).prompt_tokens.tolist()
          [100]
        """
        kept = self.output_tokens >= min_output
        if max_prompt is not None:
            kept &= self.prompt_tokens <= max_prompt
        if max_total is not None:
            kept &= self.total_tokens <= max_total
        if first_turns:
            if self.conversation_ids is None:
                raise ConfigError(f"first_turns was asked for, but {self.source} knows no conversations")
            kept &= np.diff(self.conversation_ids, prepend=-1) != 0
        return self if kept.all() else self.where(kept)


def fixed_lengths(prompt_tokens: int, output_tokens: int, *, count: int = 1) -> Lengths:
    """`count` requests that are all alike."""
    prompts = np.full(count, prompt_tokens)
    return Lengths(
        source=f"fixed {prompt_tokens}+{output_tokens}",
        prompt_tokens=prompts,
        output_tokens=np.full_like(prompts, output_tokens),
    )


def log_normal_lengths(
    prompt_mean: float, output_mean: float, *, sigma: float = 1.0, count: int = 10_000, seed: int = 0
) -> Lengths:
    """Requests whose lengths are independent and log-normal: rounded, and at least one token each.

    Args:
      prompt_mean, output_mean: means of the distributions, tokens.
      sigma: standard deviation of the logarithms; 0 makes them all alike.
      count: requests to draw.
      seed: same seed, same requests.

    Raises:
      ConfigError: an argument is out of range.

    Example:
      >>> lengths = log_normal_lengths(19.31, 58.45, sigma=0.5)
      >>> len(lengths), round(lengths.mean_prompt_tokens), round(lengths.mean_output_tokens)
      (10000, 19, 58)
    """
    source = f"log-normal {prompt_mean:g}+{output_mean:g}, sigma {sigma:g}"
    for name, value, low, high in (
        ("the mean of prompts", prompt_mean, 1, 1e8),
        ("the mean of outputs", output_mean, 1, 1e8),
        ("sigma", sigma, 0, 3),
        ("count", count, 1, 10_000_000),
        ("seed", seed, 0, 2**63),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} of {source} is {value:g}, expected {low} to {high:g}")
    rng = np.random.default_rng(seed)

    def draw(mean: float) -> np.ndarray:
        tokens = mean * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
        return np.clip(np.rint(tokens), 1, MAX_TOKENS).astype(np.int64)

    return Lengths(source=source, prompt_tokens=draw(prompt_mean), output_tokens=draw(output_mean))

"""`GenerationRequest`: a request for text, checked and tokenized: all that is left to do is to run it."""

from dataclasses import dataclass, field
from typing import Literal

from jpaged.request import SamplingParams

GenerationEndpoint = Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """One prompt.

    Attributes:
      token_ids: after truncation.
      text: what `echo` puts before the answers; `None` without it.
    """

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What was asked for.

    Attributes:
      endpoint: "completions" or "chat".
      prompts: at least one.
      params: how to sample, and what of log-probabilities the engine has to give.
      stream: answer by events.
      include_usage, continuous_usage: see `stream_options`.
      echo: put the prompt before the answers.
      wants_logprobs: give the log-probabilities of the answers.
      prompt_logprobs: likeliest tokens to give for each token of the prompts, in a list of their own; `None`: no list
        (`echo` has them in that of the answers).
      wants_token_ids: give token ids.
      names_token_ids: spell tokens as "token_id:ID".
      form: the parameter that says which form the answers must have, if one does.
      name: the client's own id of the request.
      priority, cache_salt: see `Request`.
    """

    endpoint: GenerationEndpoint
    prompts: tuple[PromptTokens, ...]
    params: SamplingParams = field(repr=False)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    wants_logprobs: bool = False
    prompt_logprobs: int | None = None
    wants_token_ids: bool = False
    names_token_ids: bool = False
    form: str | None = None
    name: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_sequences(self) -> int:
        """That the engine runs for it."""
        return len(self.prompts) * self.params.num_sequences

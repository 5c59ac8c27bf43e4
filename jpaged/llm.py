"""`LLM`: load a model and generate, chat or score, in three lines."""

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import jax

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.errors import ConfigError, RequestError
from jpaged.fetch import fetch
from jpaged.models import PagedModel, load_model
from jpaged.progress import GenerationProgress, progress_wanted
from jpaged.request import Output, SamplingParams
from jpaged.stats import EngineStats
from jpaged.tokenizer import Tokenizer

Prompt = str | AbstractSequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Attributes:
      token_ids: the text's tokens.
      logprobs: natural-log probability of each token given those before it; the first token has none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total_logprob(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability.

        Example:
          >>> Score((1, 2, 3), (math.log(0.5), math.log(0.125))).perplexity
          4.0
        """
        return math.exp(-self.total_logprob / len(self.logprobs))


class LLM:
    """A model, its tokenizer and an engine.

    Args:
      model: a known name ("smollm2-135m-instruct"), a folder of safetensors or an Orbax checkpoint, a .gguf file, a
        Hugging Face id, or a `PagedModel` object.
      tokenizer: a `Tokenizer`, a path to load it from, or `None`: the model's own (none for a model object).
      dtype: of weights and activations; `None`: float32 on CPU, bfloat16 elsewhere.
      weights: "int8" or "fp8": the layers' kernels are held so (`load_model`); what that saves goes to the pages.
      config: `EngineConfig`; the seven shortcuts below override its fields.
      page_size, num_pages: see `CacheConfig`.
      max_num_seqs, max_num_batched_tokens, max_num_prefill_tokens, max_model_len: see `SchedulerConfig`.
      speculation: see `SpeculationConfig`.
      progress: show progress bars while loading and generating; `None`: on a terminal only.

    Raises:
      FetchError, ModelLoadError, ConfigError: what is wrong and what to do.

    Example:
      >>> from jpaged.models import Llama, LlamaConfig
      >>> from flax import nnx
      >>> tiny = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
      >>> llm = LLM(Llama(tiny, rngs=nnx.Rngs(0)), num_pages=9)
      >>> outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
      >>> [len(output.token_ids) for output in outputs]
      [4, 4]
    """

    def __init__(
        self,
        model: str | Path | PagedModel = "smollm2-135m-instruct",
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        config: EngineConfig | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_prefill_tokens: int | None = None,
        max_model_len: int | None = None,
        speculation: SpeculationConfig | None = None,
        progress: bool | None = None,
    ):
        self._progress = progress
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config is {config!r:.80}, expected an EngineConfig")
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer | str | Path):
            raise ConfigError(f"tokenizer is {tokenizer!r:.80}, expected a jpaged.Tokenizer or a path to load one from")
        config = _with_shortcuts(
            config or EngineConfig(),
            cache={"page_size": page_size, "num_pages": num_pages},
            scheduler={
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_num_prefill_tokens": max_num_prefill_tokens,
                "max_model_len": max_model_len,
            },
        )
        if speculation is not None:
            config = replace(config, speculation=speculation)
        served: PagedModel
        if isinstance(model, str | Path):
            path = fetch(str(model), progress=progress)
            if tokenizer is None:
                tokenizer = Tokenizer.load(path)
            if dtype is None:
                dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
            with GenerationProgress.loading(f"loading {path.name}", progress_wanted(progress)) as report:
                served = load_model(path, dtype=dtype, weights=weights, progress=report)
        elif dtype is not None or weights is not None:
            name = "dtype" if weights is None else "weights"
            raise ConfigError(f"{name} is for models that are loaded; a model object has its own")
        else:
            served = model
        if isinstance(tokenizer, str | Path):
            tokenizer = Tokenizer.load(Path(tokenizer))
        eager = config.warmup == "eager"
        # The engine is told of this list, not of the LLM: a cycle would keep weights and pages alive after `del llm`.
        bars = self._bars = [GenerationProgress(enabled=eager and progress_wanted(progress), what="starting")]
        with bars[-1]:
            self.engine = Engine(
                served, config, tokenizer=tokenizer, on_compile=lambda shape: bars[-1].note(f"compiling {shape}")
            )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @overload
    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        progress: bool | None = None,
        priority: int | AbstractSequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        progress: bool | None = None,
        priority: int | AbstractSequence[int] = 0,
        cache_salt: str | None = None,
    ) -> Iterator[Output]: ...
    def generate(self, prompts, params=None, *, stream=False, progress=None, priority: Any = 0, cache_salt=None):
        """Continues prompts, all at once.

        Args:
          prompts: text or token ids, or a list of either. A list of integers is one prompt.
          params: one for all, or one a prompt; `SamplingParams()` if left out.
          stream: give an iterator of `Output`s as they grow, in whatever order; the last one of each request is
            `finished` (unless `engine.abort` ended it, which returns its last one itself). `request_id` is the prompt's
            index.
          progress: show a progress bar; `None`: as the `LLM` was told.
          priority: one for all, or one a prompt; lower is served first, if the scheduler's policy is "priority".
          cache_salt: KV is shared with requests of the same salt only.

        Returns:
          One `Output` a prompt, in order, with `params.n` completions each; with `stream`, an iterator.

        Raises:
          RequestError: some prompt or parameter is refused; nothing was run.
        """
        prompts = _as_list(prompts)
        params = _as_params(params, len(prompts))
        priorities = list(priority) if isinstance(priority, AbstractSequence) else [priority] * len(prompts)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"got {len(priorities)} priorities for {len(prompts)} prompts; give one, or one a prompt"
            )
        options = [{"priority": one, "cache_salt": cache_salt} for one in priorities]
        outputs = self._run(prompts, params, options, stream=stream, progress=progress)
        if stream:
            return outputs
        by_id = {output.request_id: output for output in outputs}
        return [by_id[f"{index}"] for index in range(len(prompts))]

    def chat(
        self,
        messages: AbstractSequence[Message] | AbstractSequence[AbstractSequence[Message]],
        params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[Output] | Iterator[Output]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
          messages: dicts with "role" and "content"; or a list of such lists.
          params, stream, progress: as in `generate`.
          template_options: passed to the template, such as `tools`.

        Raises:
          ChatTemplateError: the template refused the messages.
          RequestError: no tokenizer, or a request is refused.
        """
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer with a chat template; this LLM has no tokenizer")
        if not isinstance(messages, AbstractSequence) or isinstance(messages, str):
            raise RequestError(f"messages must be a list of messages, or a list of such lists, got {messages!r:.80}")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            if not isinstance(conversation, AbstractSequence):
                raise RequestError(f"a conversation must be a list of messages, got {conversation!r:.80}")
        prompts = [self.tokenizer.encode_chat(list(c), **template_options) for c in conversations]
        if stream:
            return self.generate(prompts, params, stream=True, progress=progress)
        return self.generate(prompts, params, progress=progress)

    def score(self, texts: Prompt | AbstractSequence[Prompt], *, progress: bool | None = None) -> list[Score]:
        """Log-probabilities and perplexity of texts under the model.

        Args:
          texts: text or token ids, at least two tokens each, or a list of either.
          progress: as in `generate`.

        Raises:
          RequestError: a text has fewer than two tokens, or is longer than the context limit (nothing was run then), or
            the model produced NaN for it.
        """
        tokenizer = self.tokenizer
        prompts = [tokenizer.encode(t) if tokenizer and isinstance(t, str) else t for t in _as_list(texts)]
        for index, prompt in enumerate(prompts):
            if hasattr(prompt, "__len__") and len(prompt) == 1:
                raise RequestError(f"text {index} has one token; there is nothing to score before the second")
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        scores = []
        for index, output in enumerate(self.generate(prompts, params, progress=progress)):
            if output.finish_reason == "error":
                raise RequestError(f"text {index}: {output.error}")
            logprobs = tuple(entry.logprob for entry in output.prompt_logprobs or () if entry is not None)
            scores.append(Score(output.prompt_token_ids, logprobs))
        return scores

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> str:
        """Computes the KV of a prompt and keeps it until `unpin_prefix`, for all later prompts that begin with it.

        Args:
          prompt: text or token ids.
          cache_salt: prompts with the same salt alone find it.

        Returns:
          The name to unpin it by.

        Raises:
          RequestError: the prompt is refused, there is no prefix cache, or a stream is still running.
        """
        self._require_idle()
        name = self.engine.pin_prefix(prompt, cache_salt=cache_salt)
        while self.engine.has_work:
            self.engine.step()
        return name

    def unpin_prefix(self, name: str) -> bool:
        """Lets a pinned prefix go; it stays cached until its pages are needed. False if there is none of that name."""
        return self.engine.unpin_prefix(name)

    def _require_idle(self) -> None:
        if self.engine.has_work:
            raise RequestError("this LLM is still generating; finish or close the running stream first")

    def stats(self) -> EngineStats:
        """Counters of the engine and its page pool."""
        return self.engine.stats()

    def _run(self, prompts, params, options, *, stream: bool, progress: bool | None) -> Iterator[Output] | list[Output]:
        self._require_idle()
        added: list[str] = []
        try:
            for index, (prompt, one, others) in enumerate(zip(prompts, params, options, strict=True)):
                added.append(self.engine.add(prompt, one, request_id=f"{index}", stream=stream, **others))
        except BaseException:
            self._abort(added)
            raise
        steps = self._steps(added, progress_wanted(self._progress if progress is None else progress))
        next(steps)  # enters the `try`: closing or dropping the iterator now always ends its requests
        return steps if stream else list(steps)

    def _steps(self, added: list[str], show: bool) -> Iterator[Output]:
        try:
            yield  # type: ignore[misc]  # consumed by `_run`
            with GenerationProgress(enabled=show, total=len(added)) as bar:
                self._bars[-1] = bar
                while self.engine.has_work:
                    outputs = self.engine.step()
                    bar.advance(sum(output.finished for output in outputs), self.engine)
                    yield from outputs
        finally:
            # Reached early by Ctrl-C, by an error, or when a stream is closed before its end.
            self._abort(added)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)


def make_engine(**options: Any) -> Engine:
    """The engine of `LLM(**options)`: the maker of an `EngineProcess`."""
    return LLM(**options).engine


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    is_list = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
    if isinstance(prompts, Mapping) or not is_list or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"prompts must be text, token ids, or a list of either, got {prompts!r:.80}")
    if len(prompts) and (not hasattr(prompts[0], "__len__") or getattr(prompts[0], "ndim", 1) == 0):
        return [prompts]
    return list(prompts)


def _as_params(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, AbstractSequence):
        raise RequestError(f"params is {params!r:.80}, expected SamplingParams, or a list with one a prompt")
    params = list(params)
    if len(params) != count:
        raise RequestError(f"got {len(params)} SamplingParams for {count} prompts; give one, or one a prompt")
    return params


def _with_shortcuts(config: EngineConfig, *, cache: dict[str, Any], scheduler: dict[str, Any]) -> EngineConfig:
    def override(part: CacheConfig | SchedulerConfig, values: dict[str, Any]) -> Any:
        return replace(part, **{name: value for name, value in values.items() if value is not None})

    return replace(config, cache=override(config.cache, cache), scheduler=override(config.scheduler, scheduler))

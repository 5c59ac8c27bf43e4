"""`OutputBuilder`: what the sequences of a request produce -> `Output`."""

from jpaged.beam_search import BeamSearch, Hypothesis
from jpaged.completion_builder import CompletionBuilder, text_of
from jpaged.delta import Delta
from jpaged.incremental_decoder import IncrementalDecoder
from jpaged.request import Completion, Output, TokenLogprobs
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.timing import RequestTiming
from jpaged.tokenizer import Tokenizer


class OutputBuilder:
    """Collects the answers to one request.

    Args:
      group: its sequences.
      prompt: the prompt's text, if it came as text.
      tokenizer: `None`: no text is made, and stop strings are refused before.

    Attributes:
      error: what went wrong, if something did.
    """

    def __init__(self, group: SequenceGroup, prompt: str | None, tokenizer: Tokenizer | None):
        self._group = group
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._builders: dict[Sequence, CompletionBuilder] = {}
        wants_prompt = group.request.params.prompt_logprobs is not None
        self._prompt_logprobs: dict[int, TokenLogprobs] | None = {} if wants_prompt else None
        self.error: str | None = None

    def set_prompt_logprobs(self, position: int, logprobs: TokenLogprobs) -> None:
        """Of the prompt token at `position`; a preempted prompt is computed again and sets them again."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[position] = logprobs

    def add_token(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> str | None:
        """Takes the next token of one sequence; see `CompletionBuilder.add_token`."""
        builder = self._builders.get(seq) or self._builder(seq)
        return builder.add_token(token_id, logprobs, ends=ends)

    def finish(self, seq: Sequence) -> None:
        """One sequence ended: what was held back of its text becomes visible."""
        if self._group.beam is None:  # a beam that was dropped is no answer, and there are many of them
            self._builder(seq).finish()

    def deltas(self) -> list[Delta]:
        """What became known of each answer since the last call. Not for beam searches and `best_of`."""
        deltas, builders = [], self._builders
        for index, seq in enumerate(self._group.seqs):
            delta = (builders.get(seq) or self._builder(seq)).delta(index)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def output(self, timing: RequestTiming | None = None) -> Output:
        """The answers so far; whole once the group is finished.

        Args:
          timing: of a request that ended.
        """
        group = self._group
        # Beams are no answers; only the hypotheses of a search are.
        completions = self._sampled() if group.beam is None else self._searched(group.beam)
        return Output(
            request_id=group.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=group.request.prompt_token_ids,
            completions=completions,
            finished=group.is_finished,
            prompt_logprobs=self.prompt_logprobs(),
            num_cached_tokens=group.seqs[0].num_cached_tokens,
            num_preemptions=group.num_preemptions,
            error=self.error,
            timing=timing,
        )

    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry a token of the prompt, if asked for; `None` for those that are not known yet, and for the first."""
        if self._prompt_logprobs is None:
            return None
        return tuple(map(self._prompt_logprobs.get, range(len(self._group.request.prompt_token_ids))))

    def _builder(self, seq: Sequence) -> CompletionBuilder:
        builder = self._builders.get(seq)
        if builder is None:
            builder = self._builders[seq] = CompletionBuilder(seq, self._tokenizer)
        return builder

    def _sampled(self) -> tuple[Completion, ...]:
        n, seqs = self._group.request.params.n, self._group.seqs
        if len(seqs) > n:  # the best of more
            seqs = sorted(seqs, key=lambda seq: -self._builder(seq).mean_logprob)[:n]
        return tuple(self._builder(seq).completion(index) for index, seq in enumerate(seqs))

    def _searched(self, beam: BeamSearch) -> tuple[Completion, ...]:
        reason = self._group.seqs[0].finish_reason
        if reason in ("abort", "error"):
            return (Completion(index=0, text="", token_ids=(), finish_reason=reason),)
        return tuple(self._hypothesis(index, found) for index, found in enumerate(beam.results()))

    def _hypothesis(self, index: int, found: Hypothesis) -> Completion:
        params, text = self._group.request.params, ""
        if self._tokenizer is not None:
            keep = found.stop_token is None or params.include_stop_str_in_output
            shown = found.token_ids if keep else found.token_ids[:-1]
            decoder = IncrementalDecoder(self._tokenizer, params.skip_special_tokens)
            text = text_of(decoder, shown) + decoder.finish()
        return Completion(
            index=index,
            text=text,
            token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_token if found.stop_token in params.stop_token_ids else None,
            cumulative_logprob=found.cumulative_logprob,
            score=found.score,
        )

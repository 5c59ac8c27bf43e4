"""`Limits`: how long a sequence may get, and which requests can never be served."""

from collections.abc import Iterable

from jpaged.errors import ConfigError, PromptTooLongError, RequestError
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request
from jpaged.sequence import SequenceGroup


class Limits:
    """What the context and the page pool allow.

    Args:
      memory: its pages; pinned ones do not count.
      max_model_len: tokens of a sequence at the most, prompt and output together.
      max_num_seqs: sequences that run at once.
      chunk: tokens of a sequence in one step at the most.

    Raises:
      ConfigError: `max_model_len` leaves no room for a prompt and an output token.
    """

    def __init__(self, memory: MemoryManager, *, max_model_len: int, max_num_seqs: int, chunk: int) -> None:
        if max_model_len < 2:
            raise ConfigError(f"max_model_len is {max_model_len}, expected at least 2 (a prompt and an output token)")
        self._memory = memory
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._chunk = chunk

    def num_tokens(self, request: Request) -> int:
        """Tokens at which a sequence of the request ends, prompt included."""
        if request.params.max_tokens is not None:
            return len(request.prompt_token_ids) + request.params.max_tokens
        return self._most(request)

    def num_pages(self, request: Request, num_tokens: int | None = None) -> int:
        """Pages that the request holds at the most; full pages of the prompt are shared.

        Args:
          num_tokens: of each sequence; by default all that it may get.
        """
        count, prompt = request.params.num_sequences, len(request.prompt_token_ids)
        num_tokens = self.num_tokens(request) if num_tokens is None else num_tokens
        each = self._memory.pages_at_most(num_tokens, self._chunk)
        shared = 0 if self._memory.sliding_window is not None else prompt // self._memory.allocator.page_size
        return shared + count * (each - shared)

    def require_fits(self, request: Request) -> None:
        """Refuses what can never be served.

        Raises:
          PromptTooLongError: it does not fit into the context window or into the page pool.
          RequestError: the prompt is empty, or more sequences are asked for than can run at once.
        """
        params, num_prompt, name = request.params, len(request.prompt_token_ids), f"request {request.request_id!r}"
        if num_prompt == 0:
            raise RequestError(f"{name} has an empty prompt, expected at least one token")
        if params.num_sequences > self._max_num_seqs:
            raise RequestError(
                f"{name} asks for {params.num_sequences} sequences (n, best_of), expected at most max_num_seqs "
                f"({self._max_num_seqs})"
            )
        limit = self._most(request)
        what, fewer = self._what(limit), "; or ask for fewer answers (n, best_of)" if params.num_sequences > 1 else ""
        most = limit if params.max_tokens == 0 else limit - 1
        if most < 1:
            raise PromptTooLongError(
                f"{name} cannot run with any prompt: prompt and output share {what}; enlarge the pool (num_pages), or "
                f"unpin prefixes{fewer}"
            )
        if num_prompt > most:
            raise PromptTooLongError(
                f"{name} has a prompt of {num_prompt} tokens, expected at most {most}: "
                f"prompt and output share {what}; shorten the prompt{fewer}"
            )
        if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
            raise PromptTooLongError(
                f"{name} asks for {num_prompt} prompt and {params.max_tokens} output tokens, which exceeds {what}; "
                f"lower max_tokens to {limit - num_prompt} or pass None, which means whatever fits{fewer}"
            )
        if num_prompt + params.min_tokens > limit:
            raise PromptTooLongError(
                f"{name} has {num_prompt} prompt tokens and min_tokens {params.min_tokens}, which exceeds {what}; "
                f"lower min_tokens to {limit - num_prompt}{fewer}"
            )

    def require_pin(self, request: Request, groups: Iterable[SequenceGroup]) -> None:
        """Refuses to pin what would be in the way of somebody who has been taken in.

        Args:
          request: whose prompt is to be pinned.
          groups: that are being served.

        Raises:
          RequestError: one of them could not grow up to its limit any more, or there is no prefix cache.
        """
        name, memory = f"request {request.request_id!r}", self._memory
        if memory.prefix_cache is None:
            raise RequestError(f"{name} is to be pinned, but there is no prefix cache (CacheConfig.prefix_cache)")
        pinned = memory.allocator.pages_for(len(request.prompt_token_ids))
        for group in groups:
            needed, other = self.num_pages(group.request, group.limit), group.request.request_id
            if needed > memory.capacity - pinned:
                raise RequestError(
                    f"{name} is to pin {pinned} of {memory.capacity} pages, but request {other!r}, which is being "
                    f"served, may need {needed}; wait for its end, or pin fewer tokens"
                )

    def _most(self, request: Request) -> int:
        """Tokens that each sequence of the request can have, whatever it asks for."""
        memory, size, count = self._memory, self._memory.allocator.page_size, request.params.num_sequences
        capacity = memory.capacity_for(request)
        if memory.sliding_window is not None:
            if count * memory.pages_at_most(self._max_model_len, self._chunk) <= capacity:
                return self._max_model_len
            return min(self._max_model_len, capacity // count * size)
        shared = min(len(request.prompt_token_ids) // size, capacity)
        return min(self._max_model_len, (shared + (capacity - shared) // count) * size)

    def _what(self, limit: int) -> str:
        if limit == self._max_model_len:
            return f"the context limit, max_model_len, of {self._max_model_len} tokens"
        pages, size = self._memory.capacity, self._memory.allocator.page_size
        pinned = self._memory.allocator.num_pages - 1 - pages
        others = f"; {pinned} more are pinned" if pinned else ""
        return f"the page pool of {pages * size} tokens ({pages} pages{others})"

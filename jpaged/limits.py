"""`Limits`: how long a sequence may get, and which requests can never be served."""

from jpaged.errors import ConfigError, PromptTooLongError, RequestError
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request


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

    def num_pages(self, request: Request) -> int:
        """Pages that the request holds at the most, grown up to its limit; full pages of the prompt are shared."""
        count, prompt = request.params.num_sequences, len(request.prompt_token_ids)
        each = self._memory.pages_at_most(self.num_tokens(request), self._chunk)
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
        what = self._what(limit)
        most = limit if params.max_tokens == 0 else limit - 1
        if num_prompt > most:
            raise PromptTooLongError(
                f"{name} has a prompt of {num_prompt} tokens, expected at most {most}: "
                f"prompt and output share {what}; shorten the prompt"
            )
        if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
            raise PromptTooLongError(
                f"{name} asks for {num_prompt} prompt and {params.max_tokens} output tokens, which exceeds {what}; "
                f"lower max_tokens to {limit - num_prompt} or pass None, which means whatever fits"
            )
        if num_prompt + params.min_tokens > limit:
            raise PromptTooLongError(
                f"{name} has {num_prompt} prompt tokens and min_tokens {params.min_tokens}, which exceeds {what}; "
                f"lower min_tokens to {limit - num_prompt}"
            )

    def _most(self, request: Request) -> int:
        """Tokens that each sequence of the request can have, whatever it asks for."""
        memory, size, count = self._memory, self._memory.allocator.page_size, request.params.num_sequences
        if memory.sliding_window is not None:
            if count * memory.pages_at_most(self._max_model_len, self._chunk) <= memory.capacity:
                return self._max_model_len
            return min(self._max_model_len, memory.capacity // count * size)
        shared = min(len(request.prompt_token_ids) // size, memory.capacity)
        return min(self._max_model_len, (shared + (memory.capacity - shared) // count) * size)

    def _what(self, limit: int) -> str:
        if limit == self._max_model_len:
            return f"the context limit, max_model_len, of {self._max_model_len} tokens"
        pages = self._memory.capacity
        return f"the page pool of {pages * self._memory.allocator.page_size} tokens ({pages} pages)"

"""What the real prefix cache finds again: by the pages that it has, and by the size of a page."""

from typing import Any

import numpy as np

from jpaged.lengths import Lengths
from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import CacheKey, PrefixCache, PrefixHit, token_bytes
from scripts.memory.prompts import Prompts
from scripts.memory.replay import rounded

_KEY = CacheKey()


class OneByOne:
    """Serves prompts one after the other, each with all its pages at once, and gives the pages back.

    Args:
      num_pages: of the pool, the null page included.
      page_size: token slots a page.
      keep_tails: partly filled last pages are kept too, as the memory manager does.
    """

    def __init__(self, num_pages: int, page_size: int, *, keep_tails: bool = True) -> None:
        self._keep_tails = keep_tails
        self.allocator = PageAllocator(num_pages, page_size)
        self.cache = PrefixCache(self.allocator)

    def find(self, tokens: bytes, num_tokens: int) -> PrefixHit:
        """What is cached of a prompt; its last token is computed anyway."""
        return self.cache.find(_KEY, tokens, max_tokens=num_tokens - 1)

    def serve(self, tokens: bytes, num_tokens: int) -> PrefixHit:
        """Computes a prompt, or what was not found of it, which is what it returns."""
        allocator, cache = self.allocator, self.cache
        width = allocator.page_size * (len(tokens) // num_tokens)
        hit = self.find(tokens, num_tokens)
        allocator.share(hit.pages)
        pages = hit.pages + allocator.allocate(allocator.pages_for(num_tokens) - len(hit.pages))
        entry = hit.chain[-1]
        for index in range(len(hit.pages), len(pages)):
            chunk = tokens[index * width : (index + 1) * width]
            if len(chunk) == width:
                entry = cache.insert(entry, chunk, pages[index])
            elif self._keep_tails:
                cache.insert_partial(entry, chunk, pages[index])
        allocator.free(pages)
        return hit


def serve_blocks(lengths: Lengths, num_pages: int | None, *, keep_tails: bool) -> dict[str, Any]:
    """A trace with hash ids, in order of arrival, on pages as large as what an id stands for.

    Args:
      lengths: the requests.
      num_pages: that can be given out; `None`: as many as there are blocks, so that nothing is ever evicted.
      keep_tails: partly filled last pages are kept too.

    Returns:
      num_pages, and by prompt tokens: hit_fraction, found in full pages; with_partial_fraction, with those of a partly
      filled or partly equal page, which is copied; num_evictions.
    """
    assert lengths.hash_ids is not None
    assert lengths.tokens_per_hash_id is not None
    if num_pages is None:
        num_pages = sum(map(len, lengths.hash_ids))
    size = lengths.tokens_per_hash_id
    pool, prompts = OneByOne(num_pages + 1, size, keep_tails=keep_tails), Prompts(lengths)
    found = partly = 0
    for index, num_tokens in enumerate(lengths.prompt_tokens.tolist()):
        hit = pool.serve(prompts.hashed(index).tobytes(), num_tokens)
        found += len(hit.pages) * size
        partly += hit.num_partial_tokens
    total = int(lengths.prompt_tokens.sum())
    return rounded(
        {
            "num_pages": num_pages,
            "hit_fraction": found / total,
            "with_partial_fraction": (found + partly) / total,
            "num_evictions": pool.cache.num_evictions,
        }
    )


def same_prompt_again(lengths: Lengths, page_size: int) -> dict[str, float]:
    """How much of a prompt is found when the very same one comes again.

    Returns:
      By prompt tokens: hit_fraction, in full pages; with_partial_fraction, with the page that is copied.
    """
    found = total = fully = 0
    pages = -(-int(lengths.prompt_tokens.max()) // page_size)
    for num_tokens in lengths.prompt_tokens.tolist():
        pool, tokens = OneByOne(pages + 2, page_size), token_bytes(np.arange(num_tokens).tolist())
        pool.serve(tokens, num_tokens)
        hit = pool.find(tokens, num_tokens)
        found, fully, total = found + len(hit.pages) * page_size, fully + hit.num_tokens, total + num_tokens
    return rounded({"hit_fraction": found / total, "with_partial_fraction": fully / total})

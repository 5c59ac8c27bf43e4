"""The chain of a sequence: what the prefix cache knows of its leading full pages (`Sequence.chain`).

An entry of the chain need not be of the sequence's own page: two sequences may compute the same tokens at a time, and
the page of the one that was first is entered. If that page is evicted, the sequence that still has these tokens enters
its own instead.
"""

from jpaged.prefix_cache import TOKEN_BYTES, CacheKey, PrefixCache, token_bytes
from jpaged.request import Request
from jpaged.sequence import NUM_COMPUTED, Sequence


def key_of(request: Request, weight_version: int) -> CacheKey:
    """With whom a request shares."""
    return CacheKey(salt=request.cache_salt, weight_version=weight_version)


def extend_chain(cache: PrefixCache, seq: Sequence, page_size: int, weight_version: int) -> None:
    """Enters the full pages that are computed and whose tokens are known.

    Args:
      cache: where.
      seq: whose chain has begun.
      page_size: token slots a page.
      weight_version: of the weights that computed all of its pages.
    """
    chain, known = seq.chain, seq.tokens
    first, end = len(chain) - 1, min(seq.counters[NUM_COMPUTED], len(known)) // page_size
    if first >= end:
        return
    pages, insert, entry = seq.pages, cache.insert, chain[first]
    if not first or not entry.attached or (entry.page is None and pages[first - 1]):
        while first > 0 and (not chain[first].attached or (chain[first].page is None and pages[first - 1])):
            first -= 1
        if first == 0:
            chain[0] = cache.root(key_of(seq.request, weight_version))
        del chain[first + 1 :]
        entry = chain[first]
    tokens, width = token_bytes(known[first * page_size : end * page_size]), page_size * TOKEN_BYTES
    for index in range(first, end):
        if not pages[index]:
            break  # left the window before its tokens were known
        at = (index - first) * width
        entry = insert(entry, tokens[at : at + width], pages[index])
        chain.append(entry)


def cut_chain(seq: Sequence) -> None:
    """Drops what was another sequence's and is gone, so that `extend_chain` enters what this one has."""
    for index, entry in enumerate(seq.chain[1:]):
        if not entry.attached or (entry.page is None and seq.pages[index]):
            del seq.chain[index + 1 :]
            return

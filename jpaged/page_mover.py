"""`PageMover`: carries out a plan's `PageTransfers`: pages to the host and back, and copies within the pool."""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from jpaged.pallas_kernels import KVPages, copy_pages, replace_pages
from jpaged.step_plan import PageTransfers

# Page ids go over in lists of these lengths, padded with the null page: one small program each.
_LENGTHS = (4, 32)


class PageMover:
    """Moves whole pages of all layers, bit by bit as they are stored.

    Args:
      kv_pages: the pool, one `KVPages` a layer; only its shapes are kept.
      num_host_pages: pages of host memory beside the host's null page; it is taken at once.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pool = [make_pages(PageSpec(4, page_size=8, num_kv_heads=1, head_dim=2, dtype="float32"))]
      >>> mover = PageMover(pool, num_host_pages=2)
      >>> pool = mover.move(pool, PageTransfers(swapped_out=((1, 1),), swapped_in=((1, 3),), copies=((3, 2),)))
      >>> pool[0].data.shape
      (4, 8, 2, 2)
    """

    def __init__(self, kv_pages: list[KVPages], *, num_host_pages: int):
        self._host = [
            np.zeros((num_host_pages + 1, *leaf.shape[1:]), leaf.dtype) if num_host_pages else None
            for leaf in jax.tree.leaves(kv_pages)
        ]
        self._implementation = kv_pages[0].spec.implementation

    def move(self, kv_pages: list[KVPages], transfers: PageTransfers) -> list[KVPages]:
        """Moves what a plan asks for, in the order of its fields. `kv_pages` is consumed.

        Pages that are saved are read as all steps dispatched so far leave them; the host waits for that.
        """
        for pages, host_pages, count in _lists(transfers.swapped_out):
            read = _read(jax.tree.leaves(kv_pages), pages)
            for values in read:
                values.copy_to_host_async()  # all layers at once
            for host, values in zip(self._host, read, strict=True):
                assert host is not None
                host[host_pages[:count]] = np.asarray(values)[:count]
        for host_pages, pages, _ in _lists(transfers.swapped_in):
            values = [host[host_pages] for host in self._host if host is not None]
            leaves, tree = jax.tree.flatten(kv_pages)
            written = _write(leaves, pages, values, implementation=self._implementation)
            kv_pages = jax.tree.unflatten(tree, written)
        for sources, copies, _ in _lists(transfers.copies):  # no page is both: a source is held, a copy was free
            kv_pages = _copy(kv_pages, sources, copies)
        return kv_pages

    def warm_up(self, kv_pages: list[KVPages]) -> list[KVPages]:
        """Compiles everything that `move` needs, by moves of the null page. `kv_pages` is consumed."""
        for length in _LENGTHS:
            null = ((0, 0),) * length
            swaps = null if self._host[0] is not None else ()
            kv_pages = self.move(kv_pages, PageTransfers(swaps, swaps, null))
        return kv_pages


def _lists(pairs: tuple[tuple[int, int], ...]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """The two sides of some pairs, in lists of few lengths, and how many of each are no padding."""
    longest = _LENGTHS[-1]
    for start in range(0, len(pairs), longest):
        part = pairs[start : start + longest]
        padded = np.zeros((2, next(length for length in _LENGTHS if length >= len(part))), np.int32)
        padded[:, : len(part)] = np.array(part, np.int32).T
        yield padded[0], padded[1], len(part)


# Of the module and not of a mover: an engine that begins anew has another one, and compiles nothing.
@partial(jax.jit, donate_argnums=0)
def _copy(kv_pages, sources, copies):
    return [copy_pages(pages, sources, copies) for pages in kv_pages]


@jax.jit
def _read(leaves, pages):
    return [leaf[pages] for leaf in leaves]


@partial(jax.jit, static_argnames="implementation", donate_argnums=0)
def _write(leaves, pages, values, implementation):
    return [replace_pages(leaf, pages, value, implementation) for leaf, value in zip(leaves, values, strict=True)]

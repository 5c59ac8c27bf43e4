"""`PagedModel`: what a model must offer to be served through pages. Our `Llama` is one instance."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec


@runtime_checkable
class PagedModel(Protocol):
    """A `flax.nnx.Module` with these members. Nothing needs to be inherited or registered.

    A model may also have:
      eos_token_ids: tuple[int, ...], the ids that end a text; without it only the stop ids of a request do.
      sliding_window: int | None, the number of positions, a token's own included, that every layer sees at most. The
        engine then returns pages that lie wholly left of it while a sequence runs. `None`, or no such member: some
        layer sees all positions, and every page is kept.

    What the engine promises: `__call__` and `logits` are traced under `jax.jit` with the model's parameters as
    arguments; tokens of one step are flat and ragged, row after row, and `meta` says which token belongs to which
    sequence; padding tokens are token 0 at position 0 of the null page, and what a model computes for them is ignored.
    What a model promises: it attends through `attend_and_write`, `attend_and_write_qkv` (or `write_kv` and
    `paged_attention`) alone, hands each layer's pages on, and mixes tokens in no other way.

    Attributes:
      vocab_size: tokens of the vocabulary (V).
      max_position: tokens of the longest sequence that it can take.

    Example (a model of one layer with learned positions):
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jpaged.pallas_kernels import PageSpec, attend_and_write, plan_attention
      >>> class Tiny(nnx.Module):
      ...     vocab_size, max_position = 16, 64
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(16, 8, rngs=rngs)
      ...         self.where = nnx.Embed(64, 8, rngs=rngs)
      ...         self.qkv = nnx.Linear(8, 24, rngs=rngs)
      ...     def page_specs(self, *, num_pages, page_size, dtype, implementation):
      ...         return [PageSpec(num_pages, page_size, 1, 8, dtype, implementation)]
      ...     def __call__(self, tokens, kv_pages, meta, *, implementation=None):
      ...         meta = plan_attention(meta, kv_pages[0].spec)
      ...         x = self.embed(tokens) + self.where(meta.positions)
      ...         q, k, v = (part[:, None, :] for part in jnp.split(self.qkv(x), 3, axis=-1))
      ...         out, pages = attend_and_write(q, k, v, kv_pages[0], meta, implementation=implementation)
      ...         return x + out[:, 0], [pages]
      ...     def logits(self, hidden):
      ...         return self.embed.attend(hidden)
      >>> isinstance(Tiny(nnx.Rngs(0)), PagedModel)
      True
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...

    def page_specs(self, *, num_pages: int, page_size: int, dtype: DTypeLike, implementation: str) -> list[PageSpec]:
        """The pages of each layer, in order of the layers; layers may differ."""
        ...

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        kv_pages: list[KVPages],
        meta: PagedMetadata,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T E"], list[KVPages]]:
        """Runs one step: writes K and V of `tokens` into the pages and gives their hidden states."""
        ...

    def logits(self, hidden: Float[Array, "S E"]) -> Float32[Array, "S V"]:
        """Scores of the next token."""
        ...

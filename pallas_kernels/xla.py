"""Paged attention in plain XLA: runs on every platform, and is what the kernels are compared with.

Flash attention over pages: a loop walks the pages of a few rows at a time and keeps a running softmax, so no more than
one run of pages is ever gathered, and no trip is made for pages that no query needs:

    rows with one query token     trips of `decode_rows` rows, the longest first   -> one query each
    rows with more                trips of `prefill_items` items of `block_q`      -> causal within the item
      for each trip: for each run of pages in [first needed, last needed)           both bounds are data

Every value that is not to be seen is masked by `where`, never by a product, since free pages may hold NaN.

Reference:
  Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691; Kwon et al., PagedAttention,
  https://arxiv.org/abs/2309.06180.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from .metadata import PagedMetadata
from .pages import KVPages
from .xla_plan import XLAWork

_MASKED = -1e30  # a score below all others; finite, so that the difference of two of them is 0 and not NaN


@dataclass(frozen=True)
class AttentionOptions:
    """The static options of an attention call.

    Attributes:
      scale: factor of the scores.
      sliding_window: a query sees itself and the `sliding_window - 1` tokens before; `None` for all before.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); `None` for no cap.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def _gather(pool: Array, page_ids: Array, *, accelerator: bool) -> tuple[Array, Array]:
    """Gathers K and V of pages i32[B, C] from [N, K, 2 * Hkv, D], each as [B, Hkv, C * K, D]."""
    b, c = page_ids.shape
    _, page_size, heads, d = pool.shape
    if accelerator:
        # Whole pages: asked for heads, XLA's TPU compiler keeps a second pool with another layout.
        kv = pool.at[page_ids].get(mode="promise_in_bounds").reshape(b, c * page_size, heads // 2, 2, d)
        return kv[:, :, :, 0].swapaxes(1, 2), kv[:, :, :, 1].swapaxes(1, 2)
    # A gather that also moves the heads out: on CPU it takes half the time of gathering pages and transposing them.
    k, v = (_gather_heads(pool, page_ids, jnp.arange(which, heads, 2, dtype=jnp.int32)) for which in (0, 1))
    return k, v


def _gather_joint(pool: Array, page_ids: Array) -> Array:
    """Gathers K and V of pages side by side, as [B, Hkv, C * K, 2 * D]: they are neighbours in memory."""
    pages, page_size, heads, d = pool.shape
    joint = pool.reshape(pages, page_size, heads // 2, 2 * d)
    return _gather_heads(joint, page_ids, jnp.arange(heads // 2, dtype=jnp.int32))


def _gather_heads(pool: Array, page_ids: Array, heads: Array) -> Array:
    """Gathers heads of pages i32[B, C] from [N, K, H, D] as [B, heads, C * K, D]."""
    kv = pool.at[page_ids[:, None, :], :, heads[None, :, None], :].get(mode="promise_in_bounds")
    return kv.reshape(page_ids.shape[0], heads.shape[0], -1, pool.shape[3])


def _walk(q, rows, first, count, kv_pages, page_table, sinks, *, pages, accelerator, options, with_lse):
    """Attention of B items of M query tokens each over the pages of their rows.

    Args:
      q: [B, M, Hq, D] queries.
      rows: i32[B] rows of the items.
      first: i32[B] position of each item's first query.
      count: i32[B] queries of each item, 0 for an item that is padding.
      pages: pages gathered a trip.

    Returns:
      f32[B, M, Hq, D] outputs and, `with_lse`, f32[B, M, Hq] log-sum-exps (else `None`); no meaning beyond `count`.
    """
    spec = kv_pages.spec
    b, m, hq, d = q.shape
    hkv, page_size, run = spec.num_kv_heads, spec.page_size, pages * spec.page_size
    g = hq // hkv
    # On an accelerator factors stay 16-bit, which is fast, if q's dtype holds the pages' values exactly; sums are f32.
    exact = spec.quantized or spec.dtype == q.dtype
    dtype = q.dtype if accelerator and exact else jnp.dtype(jnp.float32)
    product = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    # [B, Hkv, M * G, D]: the query heads of a KV head share its keys in one matrix product.
    q = q.reshape(b, m, hkv, g, d).transpose(0, 2, 1, 3, 4).reshape(b, hkv, m * g, d).astype(dtype)
    # For single queries CPU time goes into reading pages, and one gather of K beside V costs less than two. K is then
    # all of it, under a q that is 0 along V; V is all of it too, and the half of the sum that came from K is cut off.
    joint = m == 1 and not accelerator
    if joint:
        q = jnp.concatenate([q, jnp.zeros_like(q)], axis=-1)

    q_positions = first[:, None] + jnp.arange(m, dtype=jnp.int32)
    stop = jnp.where(count > 0, first + count, 0)  # keys at and after it are not seen by any query of the item
    if options.sliding_window is None:
        start, first_run = jnp.zeros_like(stop), 0
    else:
        start = jnp.where(count > 0, jnp.maximum(first - (options.sliding_window - 1), 0), jnp.iinfo(jnp.int32).max)
        first_run = jnp.min(start) // run
    last_run = -(-jnp.max(stop) // run)

    def trip(i, state):
        top, total, acc = state
        # Past the table's end a column is read twice, and masked: its positions are not below `stop`.
        columns = jnp.minimum(i * pages + jnp.arange(pages, dtype=jnp.int32), page_table.shape[1] - 1)
        page_ids = page_table[rows[:, None], columns]
        positions = i * run + jnp.arange(run, dtype=jnp.int32)
        seen = (positions >= start[:, None]) & (positions < stop[:, None])  # [B, run]
        visible = (positions <= q_positions[:, :, None]) & seen[:, None]  # [B, M, run]
        if options.sliding_window is not None:
            visible &= positions > q_positions[:, :, None] - options.sliding_window

        zero = jnp.zeros((), dtype)
        if joint:
            kv = _gather_joint(kv_pages.data, page_ids).astype(dtype)
            k = v = jnp.where(seen[:, None, :, None], kv, zero)
            # Keys on the left: the CPU takes half the time for the thin product of a few query heads.
            s = product("bhkd,bhmd->bhkm", k, q).swapaxes(2, 3) * options.scale
        else:
            k, v = (x.astype(dtype) for x in _gather(kv_pages.data, page_ids, accelerator=accelerator))
            v = jnp.where(seen[:, None, :, None], v, zero)
            s = product("bhmd,bhkd->bhmk", q, k) * options.scale
        if kv_pages.scales is not None:
            kv_scales = kv_pages.scales[page_ids].reshape(b, pages, hkv, 2, page_size)
            kv_scales = kv_scales.transpose(0, 2, 3, 1, 4).reshape(b, hkv, 2, 1, run)
            s = s * kv_scales[:, :, 0]
        if options.soft_cap is not None:
            s = options.soft_cap * jnp.tanh(s / options.soft_cap)

        # The run is split in two axes of at most 32: XLA's CPU compiler turns a longer sum into a tree of kernels.
        split = (b, hkv, m, g, pages, page_size)
        visible = visible.reshape(b, 1, m, 1, pages, page_size)
        s = jnp.where(visible, s.reshape(split), _MASKED)
        new_top = jnp.maximum(top, jnp.max(s, axis=(-2, -1)))
        # Masked scores give 0 once a query has seen a key. Before, `top` is as low as they are and they give 1: V is
        # finite there, and the first key that is seen brings a `decay` of 0 that wipes out `total` and `acc`.
        p = jnp.exp(s - new_top[..., None, None])
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.sum(p, axis=(-2, -1))
        p = p.reshape(b, hkv, m * g, run)
        unit = None
        if kv_pages.scales is not None:
            v_scales = jnp.where(seen[:, None, None], kv_scales[:, :, 1], 0.0)
            if dtype == jnp.float16:
                # Products of small weights and scales have no digits left in fp16, so the run's largest scale waits.
                unit = jnp.max(v_scales, axis=-1, keepdims=True)
                unit = jnp.where(unit > 0, unit, 1.0)
                v_scales = v_scales / unit
            p = p * v_scales
        pv = product("bhmk,bhkd->bhmd", p.astype(dtype), v)
        if unit is not None:
            pv = pv * unit
        return new_top, total, acc * decay[..., None] + pv.reshape(acc.shape)  # [..., 2 * D] if joint

    state = (b, hkv, m, g)
    if sinks is None:
        top, total = jnp.full(state, _MASKED, jnp.float32), jnp.zeros(state, jnp.float32)
    else:
        # A sink is a logit without a value: as if one key with that score had been seen before the first page.
        top, total = jnp.broadcast_to(sinks.reshape(hkv, 1, g), state), jnp.ones(state, jnp.float32)
    acc = jnp.zeros((*state, q.shape[-1]), jnp.float32)
    top, total, acc = lax.fori_loop(first_run, last_run, trip, (top, total, acc))

    total = jnp.maximum(total, 1e-30)  # at least 1 where a key was seen; 0 only in padding
    out = (acc[..., -d:] / total[..., None]).transpose(0, 2, 1, 3, 4).reshape(b, m, hq, d)
    lse = (top + jnp.log(total)).transpose(0, 2, 1, 3).reshape(b, m, hq) if with_lse else None
    return out, lse


@partial(jax.jit, static_argnames=("options", "with_lse"))
def _attend(q, kv_pages, page_table, kv_lens, cu_q_lens, work: XLAWork, sinks, *, options, with_lse):
    num_tokens, hq, d = q.shape
    blocks = work.blocks
    walk = partial(
        _walk,
        kv_pages=kv_pages,
        page_table=page_table,
        sinks=sinks,
        accelerator=blocks.accelerator,
        options=options,
        with_lse=with_lse,
    )
    num_q = cu_q_lens[1:] - cu_q_lens[:-1]

    def emit(carry, tokens, live, item_out, item_lse):
        out, lse = carry
        tokens = jnp.where(live, tokens, num_tokens)  # out of range, and so dropped
        out = out.at[tokens].set(item_out.astype(out.dtype), mode="drop")
        return out, lse.at[tokens].set(item_lse, mode="drop") if with_lse else None

    def decode(i, carry):
        at = i * blocks.decode_rows
        rows = lax.dynamic_slice(work.decode_rows, (at,), (blocks.decode_rows,))
        live = at + jnp.arange(blocks.decode_rows, dtype=jnp.int32) < work.num_decode_rows
        tokens = jnp.where(live, cu_q_lens[rows], 0)
        item_out, item_lse = walk(
            q[tokens][:, None], rows, kv_lens[rows] - 1, live.astype(jnp.int32), pages=blocks.decode_pages
        )
        return emit(carry, tokens[:, None], live[:, None], item_out, item_lse)

    def prefill(i, carry):
        at = i * blocks.prefill_items
        rows = lax.dynamic_slice(work.item_rows, (at,), (blocks.prefill_items,))
        offsets = lax.dynamic_slice(work.item_offsets, (at,), (blocks.prefill_items,))
        live = at + jnp.arange(blocks.prefill_items, dtype=jnp.int32) < work.num_items
        count = jnp.where(live, jnp.clip(num_q[rows] - offsets, 0, blocks.block_q), 0)
        q_ids = jnp.arange(blocks.block_q, dtype=jnp.int32)
        tokens = jnp.minimum((cu_q_lens[rows] + offsets)[:, None] + q_ids, num_tokens - 1)
        first = kv_lens[rows] - num_q[rows] + offsets
        item_out, item_lse = walk(q[tokens], rows, first, count, pages=blocks.prefill_pages)
        return emit(carry, tokens, q_ids < count[:, None], item_out, item_lse)

    carry = jnp.zeros((num_tokens, hq, d), q.dtype), None
    if with_lse:
        carry = carry[0], jnp.full((num_tokens, hq), -jnp.inf, jnp.float32)
    carry = lax.fori_loop(0, -(-work.num_decode_rows // blocks.decode_rows), decode, carry)
    if num_tokens > 1:  # a single token is a decode row
        carry = lax.fori_loop(0, -(-work.num_items // blocks.prefill_items), prefill, carry)
    return carry


def paged_attention_xla(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    sinks: Float32[Array, " Hq"] | None,
    options: AttentionOptions,
    with_lse: bool,
) -> tuple[Float[Array, "T Hq D"], Float32[Array, "T Hq"] | None]:
    """The XLA implementation of `paged_attention`; `meta.work` must be an `XLAWork`."""
    with jax.named_scope("paged_attention"):
        return _attend(
            q,
            kv_pages,
            meta.page_table,
            meta.kv_lens,
            meta.cu_q_lens,
            meta.work,
            sinks,
            options=options,
            with_lse=with_lse,
        )

"""The public operations: dispatch over the implementations, behind one contract."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32

from .compat import current_gpu, current_tpu
from .dispatch import current_platform, resolve_implementation, supported_implementations
from .gpu_plan import GPUWork, plan_gpu
from .kv_write import write_kv_xla
from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .rope import Rope, apply_rope, validate_rope
from .split_product import sum_parts
from .tpu_plan import TPUWork, plan_tpu
from .tpu_tuning import choose_tpu_blocks
from .tuning import choose_gpu_blocks
from .validate import validate_metadata, validate_new_kv, validate_static
from .write_plan_tpu import plan_write
from .xla import AttentionOptions, paged_attention_xla
from .xla_plan import XLAWork, plan_xla


def plan_attention(
    meta: PagedMetadata, spec: PageSpec, *, layers: Iterable[tuple[int, int | None]] = ()
) -> PagedMetadata:
    """Fills `meta.work`, the schedule of the back end that `spec` is stored for.

    Call it once a step, inside jit; all layers whose pages have an equal spec share the result.

    Args:
      layers: (query heads, sliding window) of the layers that will share it: what of the schedule depends on these is
        made here too, once for those that agree. The result is the same without; a step of many layers then takes
        several times as long to trace and to compile for a GPU.

    Raises:
      ValueError: the arrays' shapes do not agree, or query heads are no multiple of the pages' heads.
      NotImplementedError: that back end cannot run here.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PagedMetadata, PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(48, 49),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32")
      >>> work = plan_attention(meta, spec).work
      >>> int(work.num_decode_rows), int(work.num_items)
      (0, 1)
    """
    validate_metadata(meta, meta.positions.shape[0])
    layers = dict.fromkeys(layers)
    for heads, _ in layers:
        if heads < 1 or heads % spec.num_kv_heads:
            raise ValueError(
                f"{layers=} {spec.num_kv_heads=}; expected query heads that are a multiple of num_kv_heads"
            )
    resolve_implementation(spec.implementation, spec=spec)
    chip = current_tpu()
    if spec.implementation == "mosaic_tpu" and chip is not None:
        blocks = choose_tpu_blocks(spec, chip, meta.positions.shape[0])
        return dataclasses.replace(meta, work=plan_tpu(meta, plan_write(meta, spec), blocks))
    work = plan_xla(meta, spec.page_size, current_platform())
    gpu = current_gpu()
    if gpu is not None and "mosaic_gpu" in supported_implementations(spec=spec):
        blocks = choose_gpu_blocks(
            spec.head_dim,
            gpu.multiprocessors,
            spec.dtype.itemsize,
            spec.page_size,
            narrow=meta.positions.shape[0] <= meta.kv_lens.shape[0],
            units=meta.kv_lens.shape[0] * spec.num_kv_heads,
            group=max((heads // spec.num_kv_heads for heads, _ in layers), default=1),
        )
        from .attention_gpu import with_lists  # needs jax 0.11

        return with_lists(dataclasses.replace(meta, work=plan_gpu(meta, work, spec, blocks)), spec, layers)
    return dataclasses.replace(meta, work=work)


def write_kv(k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], kv_pages: KVPages, meta: PagedMetadata) -> KVPages:
    """Writes each token's K and V to its slot, quantising them where the pages are; in place if donated.

    Padding goes to slot 0, in the null page, or is not written. Where `meta.slot_mapping` is not as `PagedMetadata`
    says, tokens may be lost (`validate_dynamic` finds it).

    Raises:
      ValueError: shapes or dtypes do not fit the pages.
      NotImplementedError: the pages are stored for a back end that cannot run here.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PagedMetadata, PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(48, 49),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32")
      >>> k, v = jnp.zeros((2, 1, 2)), jnp.array([[[1.0, 0.0]], [[3.0, 4.0]]])
      >>> kv_pages = write_kv(k, v, make_pages(spec), meta)
      >>> kv_pages.data[3, :2].tolist()  # K and V of a head side by side
      [[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [3.0, 4.0]]]
    """
    validate_new_kv(k, v, kv_pages, meta)
    resolve_implementation(kv_pages.spec.implementation, spec=kv_pages.spec)
    if kv_pages.spec.implementation == "mosaic_tpu":
        from .write_tpu import write_kv_tpu as write  # Pallas for TPUs takes half a second to import
    elif kv_pages.spec.implementation == "mosaic_gpu":
        from .write_gpu import write_kv_gpu as write  # needs jax 0.11
    else:
        write = write_kv_xla
    return write(k, v, kv_pages, meta)


def paged_attention(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal attention of a step's query tokens over their rows' pages: decode, prefill chunks, or any mix.

    Query head h reads KV head h // (Hq / Hkv). Only reads: the K and V of this step must have been written.

    Args:
      q: queries of all rows, end to end; tokens from `meta.cu_q_lens[-1]` on are padding.
      kv_pages: the layer's pages.
      meta: which token belongs to which row; planned here if `plan_attention` has not been called.
      scale: factor of the scores; `None` for head_dim ** -0.5.
      sliding_window: a query sees itself and the `sliding_window - 1` tokens before it; `None` for all before it.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), before the mask; `None` for no cap.
      sinks: a logit for each query head that joins the softmax's denominator and has no value.
      return_lse: also return the log-sum-exp of each token's scores (the sink's logit included), natural log.
      implementation: "xla", "mosaic_gpu", "mosaic_tpu", or `None` to pick by the devices of the mesh in use.

    Returns:
      [T, Hq, D] outputs in q's dtype, 0 for padding; with `return_lse` a pair of them and f32[T, Hq] log-sum-exps, -inf
      for padding.

    Raises:
      ValueError: shapes, dtypes or options are wrong, or no implementation has that name.
      NotImplementedError: the implementation asked for cannot run here, or not on these pages.
      ExceptionGroup: none was asked for and none can run; one reason for each candidate.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PagedMetadata, PageSpec, make_pages, paged_attention, write_kv
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(48, 49),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> kv_pages = make_pages(PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32"))
      >>> k, v = jnp.zeros((2, 1, 2)), jnp.array([[[1.0, 0.0]], [[3.0, 4.0]]])
      >>> kv_pages = write_kv(k, v, kv_pages, meta)
      >>> paged_attention(jnp.ones((2, 1, 2)), kv_pages, meta).tolist()
      [[[1.0, 0.0]], [[2.0, 2.0]]]

    Reference:
      Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, https://arxiv.org/abs/2309.06180.
    """
    validate_static(q, kv_pages, meta, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks)
    queries = jax.ShapeDtypeStruct(q.shape, q.dtype)
    name, _ = resolve_implementation(implementation, spec=kv_pages.spec, q=queries)
    if meta.work is None:
        meta = plan_attention(meta, kv_pages.spec)
    if name == "xla" and isinstance(meta.work, GPUWork):
        meta = dataclasses.replace(meta, work=meta.work.xla)
    expected = {"mosaic_gpu": GPUWork, "mosaic_tpu": TPUWork, "xla": XLAWork}[name]
    if not isinstance(meta.work, expected):
        raise ValueError(
            f"meta.work is a {type(meta.work).__name__}; expected the schedule of {name!r}: call plan_attention with "
            "the spec of these pages"
        )
    options = AttentionOptions(
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
        sliding_window=sliding_window,
        soft_cap=None if soft_cap is None else float(soft_cap),
    )
    if name == "mosaic_gpu":
        from .attention_gpu import paged_attention_gpu as attend  # needs jax 0.11
    elif name == "mosaic_tpu":
        from .ragged_tpu import paged_attention_tpu as attend
    else:
        attend = paged_attention_xla
    out, lse = attend(q, kv_pages, meta, sinks, options, with_lse=return_lse)
    return out if lse is None else (out, lse)


def attend_and_write(
    q: Float[Array, "T Hq D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    rope: Rope | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> tuple[Any, KVPages]:
    """The op that models call: rotates q and k, writes k and v to their slots, and attends.

    Args:
      rope: angles of the tokens, or `None` if q and k are not to be rotated.
      (others): as in `paged_attention` and `write_kv`.

    Returns:
      what `paged_attention` returns, and the pages with the step's K and V.

    Raises:
      ValueError, NotImplementedError, ExceptionGroup: as `paged_attention` and `write_kv`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PagedMetadata, PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(48, 49),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32")
      >>> q, k, v = jnp.ones((2, 1, 2)), jnp.zeros((2, 1, 2)), jnp.array([[[1.0, 0.0]], [[3.0, 4.0]]])
      >>> out, kv_pages = attend_and_write(q, k, v, make_pages(spec), meta)
      >>> out.tolist(), float(kv_pages.data[3].sum())
      ([[[1.0, 0.0]], [[2.0, 2.0]]], 8.0)
    """
    q, kv_pages = _rotate_and_write(q, k, v, kv_pages, meta, rope, implementation)
    out = paged_attention(
        q,
        kv_pages,
        meta,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        implementation=implementation,
    )
    return out, kv_pages


def attend_and_write_qkv(
    qkv: Float[Array, "T H D"] | Float32[Array, "P T H D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    rope: Rope | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    return_lse: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Any, KVPages]:
    """`attend_and_write` of a fused projection: where a kernel reads it as it lies, q, k and v are not cut apart.

    Args:
      qkv: the query heads of each token, then its Hkv heads of keys, then as many of values: H = Hq + 2 Hkv. An array
        of its own, such as a product's result: of a token alone, a slice of another array may lie where a kernel for
        GPUs cannot read it. Or f32 parts of it, as `split_product` gives them.
      dtype: that the sum of parts is rounded to; needed for parts, and for nothing else.
      (others): as in `attend_and_write`.

    Returns:
      what `attend_and_write` returns.

    Raises:
      ValueError, NotImplementedError, ExceptionGroup: as `attend_and_write`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PagedMetadata, PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(48, 49),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32")
      >>> qkv = jnp.array([[[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 0.0], [3.0, 4.0]]])
      >>> out, kv_pages = attend_and_write_qkv(qkv, make_pages(spec), meta)
      >>> out.tolist(), float(kv_pages.data[3].sum())
      ([[[1.0, 0.0]], [[2.0, 2.0]]], 8.0)
    """
    kv_heads = kv_pages.spec.num_kv_heads
    heads = qkv.shape[-2] - 2 * kv_heads
    if heads < 1:
        raise ValueError(f"{qkv.shape=}; expected [T, Hq + 2 Hkv, D], with Hkv = {kv_heads} from kv_pages.spec")
    if (dtype is None) != (qkv.ndim == 3):
        raise ValueError(f"{qkv.shape=} {dtype=}; expected a dtype for parts [P, T, H, D], and none for [T, H, D]")
    whole = qkv if dtype is None else sum_parts(qkv, dtype)  # computed only where it is used
    q, k, v = jnp.split(whole, [heads, heads + kv_heads], axis=1)
    small = qkv.size < 2**31  # the kernel's offsets have 32 bits
    if rope is not None and rope.cos.shape[1] % 2 == 0 and small and _writes_by_gpu_kernel(kv_pages, implementation):
        from .write_gpu import rotate_and_write_qkv_gpu  # needs jax 0.11

        validate_rope(whole, rope)
        validate_new_kv(k, v, kv_pages, meta)
        q, kv_pages = rotate_and_write_qkv_gpu(qkv, kv_pages, meta, rope, dtype=dtype)
    else:
        q, kv_pages = _rotate_and_write(q, k, v, kv_pages, meta, rope, implementation)
    out = paged_attention(
        q,
        kv_pages,
        meta,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        implementation=implementation,
    )
    return out, kv_pages


def _writes_by_gpu_kernel(kv_pages: KVPages, implementation: str | None) -> bool:
    return resolve_implementation(implementation, spec=kv_pages.spec)[0] == "mosaic_gpu"


def _rotate_and_write(q, k, v, kv_pages: KVPages, meta: PagedMetadata, rope: Rope | None, implementation: str | None):
    """The rotated q and the written pages: by one kernel on Hopper."""
    if rope is not None:
        validate_rope(q, rope)
        validate_rope(k, rope)
    validate_new_kv(k, v, kv_pages, meta)
    if _writes_by_gpu_kernel(kv_pages, implementation):
        from .write_gpu import rotate_and_write_gpu  # needs jax 0.11

        return rotate_and_write_gpu(q, k, v, kv_pages, meta, rope)
    if rope is not None:
        with jax.named_scope("rope"):
            q, k = apply_rope(q, rope), apply_rope(k, rope)
    return q, write_kv(k, v, kv_pages, meta)

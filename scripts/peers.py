"""Other libraries' decode attention over pages, timed in the same run as ours where they can be imported.

Each function of `PEERS` compiles or captures a cell's calls, and gives what times it, microseconds a call; it raises
`ImportError` where its library is not there. FlashAttention-3 and FlashInfer are PyTorch's: their calls are captured in
a CUDA graph, on a pool of K and a pool of V as large as ours together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages


def prepare_cudnn(
    queries: jax.Array, kv_pages: KVPages, tables: list[jax.Array], length: int, replays: int
) -> Callable[[], float]:
    """cuDNN's paged attention, which jax has in a private module.

    It wants a pool with as many pages as the step has: cells smaller than the L2 cache are read from there.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    from scripts.bench_kernels import median_us

    spec, (rows, columns) = kv_pages.spec, tables[0].shape
    pages = rows * columns
    # Pages of K, and of V, apart, as it wants them; which page is whose is another order in each call.
    k, v = (kv_pages.data[1 : pages + 1, :, n::2] for n in range(2))
    orders = [np.random.default_rng(n).permutation(pages).reshape(rows, 1, columns, 1) for n in range(len(tables))]
    lengths = [jnp.full(rows, n, jnp.int32) for n in (1, length)]

    def calls(queries, k, v, orders, lengths):
        for order in orders:
            out: Any = paged_attention(
                queries[:, None],
                k,
                v,
                lengths[0],
                lengths[1],
                order,
                order,
                scale=spec.head_dim**-0.5,
                mask_type=MaskType.PADDING,
            )
            queries = (out[0] if isinstance(out, tuple | list) else out)[:, 0]
        return queries

    step = jax.jit(calls, donate_argnums=0)
    arguments = k, v, [jnp.asarray(order, jnp.int32) for order in orders], lengths
    queries = jax.block_until_ready(step(queries + 0, *arguments))
    return lambda: median_us(step, queries, arguments, len(tables), replays)


def _prepare_torch(make_call: Callable[..., Callable[[], Any]], queries, kv_pages, tables, length, replays):
    """Captures calls that `make_call(q, k, v, table, lengths)` makes."""
    import statistics

    import torch  # pyright: ignore[reportMissingImports]

    spec = kv_pages.spec
    shape = spec.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(queries.shape, dtype=torch.bfloat16, device="cuda")
    lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device="cuda")
    calls = [make_call(q, k, v, torch.as_tensor(np.asarray(table), device="cuda"), lengths) for table in tables]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def timer() -> float:
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / replays / len(calls))
        return statistics.median(times[1:])

    return timer


def prepare_flash_attention(queries, kv_pages, tables, length, replays) -> Callable[[], float]:
    """FlashAttention-3's decode over pages."""
    from flash_attn_interface import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    def make_call(q, k, v, table, lengths):
        return lambda: flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=lengths, page_table=table, causal=True)

    return _prepare_torch(make_call, queries, kv_pages, tables, length, replays)


def prepare_flashinfer(queries, kv_pages, tables, length, replays) -> Callable[[], float]:
    """FlashInfer's decode over pages, on tensor cores; the plan of a step is made before."""
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    spec, heads = kv_pages.spec, queries.shape[1]

    def make_call(q, k, v, table, lengths):
        rows, columns = table.shape
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns,
            table.reshape(-1),
            (lengths - 1) % spec.page_size + 1,
            heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return lambda: wrapper.run(q, (k, v))

    return _prepare_torch(make_call, queries, kv_pages, tables, length, replays)


PEERS = {"cuDNN": prepare_cudnn, "FA3": prepare_flash_attention, "FlashInfer": prepare_flashinfer}

"""Times the KV write with its rotation on a GPU: the Mosaic GPU kernel against what XLA makes of the same.

    python scripts/bench_write.py [--quick] [--render FILE]

Each time is that of rotating q and k and writing K and V to their slots, device time of one layer: calls are chained in
one program, each on the q of the last and on other slots than it, over a donated pool far larger than the L2 cache; the
program is replayed and the median of several batches of replays is taken. A barrier stands between the calls, so that
XLA merges nothing of one with the next. Then `copy_pages` of 64 pages, `gather_pages` and `scatter_pages`. Prints
tables and a last line of JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, copy_pages, gather_pages, scatter_pages
from jpaged.pallas_kernels.kv_write import write_kv_xla
from jpaged.pallas_kernels.rope import Rope, apply_rope
from scripts.bench_kernels import POOL_BYTES, replay
from scripts.markdown import measured, table
from scripts.measuring import arguments_on_gpu
from scripts.report import print_json, print_table

COPY_ROOF = 4.27e12  # bytes a second, read and written, of a device-to-device copy on an H200
MODELS = ((32, 8, 128), (9, 3, 64))
TOKENS = (1, 8, 32, 64, 256, 2048, 8192)
FEW_TOKENS = (64, 8192)  # for quantised pages
# Query heads, KV heads and head_dim; dtype of the pages; tokens.
CELLS = [
    (model, dtype, TOKENS if dtype == "bfloat16" else FEW_TOKENS)
    for model in MODELS
    for dtype in ("bfloat16", "int8", "float8_e4m3fn")
]
QUICK = [
    (MODELS[0], "bfloat16", (1, 64, 256, 8192)),
    (MODELS[0], "int8", FEW_TOKENS),
    (MODELS[1], "bfloat16", FEW_TOKENS),
]
PAGE_SIZE = 16
SLOTS = 4  # slot mappings that calls use in turn


def make_pages(heads: int, head_dim: int, dtype: str, implementation: str = "xla") -> KVPages:
    num_pages = POOL_BYTES // (PAGE_SIZE * heads * 2 * head_dim * jnp.dtype(dtype).itemsize)
    spec = PageSpec(num_pages, PAGE_SIZE, heads, head_dim, dtype, implementation)
    fill = jax.jit(lambda: jnp.full(spec.data_shape, 1, spec.dtype))
    scales = None if spec.scales_shape is None else jnp.ones(spec.scales_shape, jnp.float32)
    return KVPages(data=fill(), scales=scales, spec=spec)


def make_metadata(slots: jax.Array) -> PagedMetadata:
    """Of what the write reads, the slots; the rest is a row that nobody looks at."""
    one = jnp.ones(1, jnp.int32)
    return PagedMetadata(one[:, None], one, jnp.array([0, 1], jnp.int32), slots, slots, jnp.int32(1), jnp.int32(1))


def bytes_moved(spec: PageSpec, num_heads: int, tokens: int) -> int:
    """What the layer must read and write: q, K and V in bfloat16, angles once, pages and scales."""
    new = tokens * spec.head_dim * 2
    pages = tokens * spec.num_kv_heads * 2 * (spec.head_dim * spec.dtype.itemsize + 4 * spec.quantized)
    return 2 * new * num_heads + 2 * new * spec.num_kv_heads + pages + tokens * spec.head_dim * 4


def xla(q, k, v, kv_pages, meta, rope):
    q, k = apply_rope(q, rope), apply_rope(k, rope)
    return q, write_kv_xla(k, v, kv_pages, meta)


def kernel(q, k, v, kv_pages, meta, rope):
    from jpaged.pallas_kernels.write_gpu import rotate_and_write_gpu

    return rotate_and_write_gpu(q, k, v, kv_pages, meta, rope)


def time_layer(op, kv_pages: KVPages, num_heads: int, tokens: int, calls: int, replays: int):
    spec, rng = kv_pages.spec, np.random.default_rng(0)
    pages = rng.permutation(spec.num_pages - 1)[: SLOTS * -(-tokens // PAGE_SIZE)] + 1
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(SLOTS, -1)[:, :tokens]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (tokens, heads, spec.head_dim), jnp.bfloat16)
        for key, heads in zip(keys, (num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True)
    )
    angles = jnp.asarray(rng.uniform(0, 6, (tokens, spec.head_dim // 2)), jnp.float32)
    rope = Rope(jnp.cos(angles), jnp.sin(angles))

    def layers(state, slots, rope):
        q, k, v, kv_pages = state
        for call in range(calls):
            q, kv_pages = op(q, k, v, kv_pages, make_metadata(slots[call % SLOTS]), rope)
            q, k, v, kv_pages = lax.optimization_barrier((q, k, v, kv_pages))
        return q, k, v, kv_pages

    step = jax.jit(layers, donate_argnums=0)
    us, state = replay(step, (q, k, v, kv_pages), (list(jnp.asarray(slots, jnp.int32)), rope), calls, replays)
    return us, state[3]


def bench_layers(kinds: list) -> list[dict]:
    results = []
    for (num_heads, heads, head_dim), dtype, all_tokens in kinds:
        kv_pages = make_pages(heads, head_dim, dtype)
        for tokens in all_tokens:
            # To start a program takes the host some 50 to 100 us, which are not to be seen: it must run for longer.
            calls, replays = (16, 10) if bytes_moved(kv_pages.spec, num_heads, tokens) > 2**26 else (64, 10)
            times = {}
            for op in (kernel, xla):
                times[op.__name__], kv_pages = time_layer(op, kv_pages, num_heads, tokens, calls, replays)
            moved, us = bytes_moved(kv_pages.spec, num_heads, tokens), times["kernel"]
            results.append(
                {
                    "heads": num_heads,
                    "kv_heads": heads,
                    "head_dim": head_dim,
                    "pages": dtype,
                    "tokens": tokens,
                    "us": round(us, 2),
                    "xla_us": round(times["xla"], 2),
                    "times_xla": round(times["xla"] / us, 2),
                    "tb_per_s": round(moved / us / 1e6, 3),
                    "roofline": round(moved / COPY_ROOF / (us * 1e-6), 3),
                }
            )
            print(json.dumps(results[-1]), flush=True)
        del kv_pages  # before the next pool is made
    return results


def bench_pages(implementation: str, count: int = 64) -> dict:
    """Whole pages of a pool, 64 KiB each: microseconds of a call, and the rate of the bytes read and written."""
    kv_pages, calls = make_pages(8, 128, "bfloat16", implementation), 16
    ids = np.random.default_rng(0).permutation(kv_pages.spec.num_pages - 1)[: 2 * count * calls] + 1
    src, dst = jnp.asarray(ids.reshape(2, calls, count), jnp.int32)

    def copies(state, src, dst):
        for call in range(calls):
            state = lax.optimization_barrier((copy_pages(state[0], src[call], dst[call]), *state[1:]))
        return state

    def gathers(state, src, dst):
        for call in range(calls):
            state = lax.optimization_barrier((state[0], *gather_pages(state[0], src[call])))
        return state

    def scatters(state, src, dst):
        for call in range(calls):
            state = lax.optimization_barrier((scatter_pages(state[0], dst[call], *state[1:]), *state[1:]))
        return state

    moved, results = 2 * count * kv_pages.spec.bytes_per_page, {}
    state = (kv_pages, *jax.jit(gather_pages)(kv_pages, src[0]))
    ids = list(src), list(dst)
    for name, op in (("copy_pages", copies), ("gather_pages", gathers), ("scatter_pages", scatters)):
        us, state = replay(jax.jit(op, donate_argnums=0), state, ids, calls, 10)
        results[name] = {"pages": count, "us": round(us, 2), "tb_per_s": round(moved / us / 1e6, 2)}
        print(implementation, name, results[name], flush=True)
    return results


def cells(results: list[dict]) -> list[list]:
    return [
        [
            f"{r['heads']}/{r['kv_heads']} x {r['head_dim']}",
            r["pages"],
            r["tokens"],
            f"{r['us']:.2f}",
            f"{r['xla_us']:.2f}",
            f"{r['times_xla']:.1f}",
            f"{r['roofline']:.0%}",
        ]
        for r in results
    ]


COLUMNS = ["Heads", "Pages", "Tokens", "Kernel, us", "XLA, us", "Times as fast", "Of the copy roof"]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    rows = [[str(x) for x in row] for row in cells(record["results"]["write"])]
    pages = [
        [name, implementation, str(r["pages"]), f"{r['us']:.2f}", f"{r['tb_per_s']:.2f}"]
        for implementation, results in record["results"]["pages"].items()
        for name, r in results.items()
    ]
    return f"{table(COLUMNS, rows)}\n{table(['Operation', 'By', 'Pages', 'us', 'TB/s'], pages)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the KV write with its rotation.")
    parser.add_argument("--quick", action="store_true", help="a few sizes, in less than a minute")
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    pages = {implementation: bench_pages(implementation) for implementation in ("mosaic_gpu", "xla")}
    results = bench_layers(QUICK if arguments.quick else CELLS)
    print_table("Rotate and write, one layer", COLUMNS, cells(results))
    print_json("bench_write", {"write": results, "pages": pages})


if __name__ == "__main__":
    main()

"""The engine with the kernels for TPU, which jax's TPU interpreter runs on the CPU: the same tokens as by XLA."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged.engine import Engine
from jpaged.request import SamplingParams
from tests.engine_driver import check_pages, make_engine
from tests.fakes import tiny_llama, tpu_mesh

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
TWO = replace(GREEDY, n=2, temperature=1.0, seed=3)
LONG = [7 * i % 61 for i in range(19)]  # three chunks of 8 tokens, and as many pages
# So few pages that somebody has to go, so few tokens a step that long prompts come in chunks, and one step shape.
SMALL = {"num_pages": 5, "budget": 8, "length": 24, "token_buckets": (8,), "scheduler": {"headroom_pages": 0}}


@contextlib.contextmanager
def as_on_tpu(kind: str) -> Iterator[None]:
    """The devices in use are described as TPUs, and their kernels are interpreted."""
    with jax.sharding.use_abstract_mesh(tpu_mesh(kind)), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield


def serve_mix(engine: Engine, *, more_prompts: tuple[list[int], ...] = ()) -> dict[str, list[tuple[int, ...]]]:
    """Tokens by request: a prompt in chunks and a short one; later one that begins as the first, and two answers."""
    done = {}
    requests = [(LONG, GREEDY), ([1, 2, 3], GREEDY), ([*LONG[:16], 5], GREEDY), ([9, 8, 7, 6, 5], TWO)]
    requests += [(prompt, GREEDY) for prompt in more_prompts]
    for index, (prompt, params) in enumerate(requests):
        engine.add(prompt, params, request_id=f"{index}")
        for _ in range(3 if index == 1 else 0):
            engine.step()  # nobody ends as early as this
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step())
        check_pages(engine)
    return {name: [completion.token_ids for completion in output.completions] for name, output in done.items()}


def test_interpreted_kernels_say_what_xla_says():
    model = tiny_llama(head_dim=64, num_hidden_layers=1)  # the slow tests have two
    expected = serve_mix(make_engine(model, implementation="xla", **SMALL))
    with as_on_tpu("TPU v4"):  # the one whose kernels are the smallest programs
        engine = make_engine(model, **SMALL)
        told = serve_mix(engine)
    assert engine.implementation == "mosaic_tpu"
    assert told == expected
    assert len(set(told["3"])) == 2
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_copied_pages, stats.num_cached_tokens) == (1, 2, 16)
    assert stats.num_compilations == 3  # the forward pass, greedy and full sampling


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "cache"),
    [
        ({"num_key_value_heads": 1}, {}),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, {"prefix_cache": False}),
        ({"sliding_window": 9}, {}),
        ({"head_dim": 128}, {"host_pages": 8}),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, {"dtype": "int8"}),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, {"dtype": "float8_e4m3fn"}),
    ],
    ids=["one-head", "odd-heads", "window", "wide-and-swapped", "int8", "float8"],
)
def test_interpreted_kernels_say_what_xla_says_of_other_models(changes, cache):
    model = tiny_llama(**{"head_dim": 64, **changes})
    options = SMALL | {"cache": cache, "budget": 24, "token_buckets": (4, 24)}
    if cache.get("host_pages"):
        options["scheduler"] = {"headroom_pages": 0, "preemption": "swap"}
    prompts = ([4] * 17, list(range(40, 51)))
    expected = serve_mix(make_engine(model, implementation="xla", **options), more_prompts=prompts)
    with as_on_tpu("TPU v5 lite"):
        engine = make_engine(model, implementation="mosaic_tpu", **options)
        assert serve_mix(engine, more_prompts=prompts) == expected

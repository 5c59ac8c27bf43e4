"""The engine on a GPU of the Hopper kind, where it runs the kernel for it."""

import glob
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.engine import Engine
from jpaged.models import Llama
from jpaged.models.layers import weights_after
from jpaged.pallas_kernels import layer_plan
from jpaged.pallas_kernels.compat import current_gpu
from jpaged.request import SamplingParams
from jpaged.sampler_tuning import TUNINGS
from tests.fakes import tiny_config

PROMPTS = [[(7 * i + j) % 61 for j in range(length)] for i, length in enumerate((3, 40, 130, 17))]
# Scores of a bfloat16 model whose two implementations round scores of attention at different places.
ATOL = 0.06


def serve(model, implementation, requests):
    config = EngineConfig(
        cache=CacheConfig(page_size=16, num_pages=65),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256),
        token_buckets=(4, 64),
        implementation=implementation,
        compilation_cache=False,
        check_invariants=True,
    )
    engine = Engine(model, config)
    for index, (prompt, params) in enumerate(requests):
        engine.add(prompt, params, request_id=f"{index}")
    outputs = {}
    while engine.has_work:
        outputs.update((output.request_id, output) for output in engine.step())
    return engine, [outputs[f"{index}"] for index in range(len(requests))]


@pytest.mark.gpu
def test_the_kernel_serves_what_xla_would():
    gpu = current_gpu()
    if gpu is None or not gpu.is_hopper:
        pytest.skip("needs a Hopper GPU")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = tiny_config(**heads, hidden_size=64, intermediate_size=128)
    model = Llama(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
    weights = weights_after(*model.layers)
    assert weights is not None
    assert layer_plan(4, weights) is not None  # so decode steps go through the layers' kernel
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    engine, outputs = serve(model, None, [(prompt, params) for prompt in PROMPTS])
    assert engine.implementation == "mosaic_gpu"
    # XLA is asked for the log-probabilities of the very tokens that came out.
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    score = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    other, scored = serve(model, "xla", [(text, score) for text in texts])
    assert other.implementation == "xla"
    for output, whole in zip(outputs, scored, strict=True):
        told = [entry.logprob for entry in output.logprobs or ()]
        expected = [entry.logprob for entry in (whole.prompt_logprobs or ())[-24:] if entry is not None]
        np.testing.assert_allclose(told, expected, rtol=0, atol=ATOL)


@pytest.mark.gpu
def test_filtered_draws_are_those_without_the_kernels(monkeypatch):
    if (gpu := current_gpu()) is None or not gpu.is_hopper:
        pytest.skip("needs a Hopper GPU")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = tiny_config(**heads, hidden_size=64, intermediate_size=128, vocab_size=9001)
    model, drawn = Llama(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16), []
    # Which tokens top_k keeps does not hang on how anything is rounded.
    params = [SamplingParams(temperature=0.9, top_k=k, seed=k, max_tokens=24, ignore_eos=True) for k in (2, 20, 300)]
    for kernels in (False, True):
        monkeypatch.setitem(TUNINGS, "gpu", replace(TUNINGS["gpu"], kernels=kernels))
        _, outputs = serve(model, None, list(zip(PROMPTS, params, strict=False)))
        drawn.append([output.token_ids for output in outputs])
    assert drawn[0] == drawn[1]
    assert len({*drawn[0][2]}) > 12  # of 24 tokens


def calls_of_decode_steps(folder: str) -> dict[int, dict[str, int]]:
    """What the host calls in 16 decode steps of 3 rows, one step a program and four, by jax's profiler."""
    from scripts.engine.breakdown import read_profile

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    config = tiny_config(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=64)
    model, calls = Llama(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16), {}
    for decode_steps in (1, 4):
        engine = Engine(
            model,
            EngineConfig(
                cache=CacheConfig(page_size=16, num_pages=65),
                scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256),
                token_buckets=(4, 64),
                decode_steps=decode_steps,
                compilation_cache=False,
            ),
        )
        for prompt in PROMPTS[:3]:
            engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        for _ in range(8 + 32 // decode_steps):
            engine.step()
        place = os.path.join(folder, f"{decode_steps}")
        jax.profiler.start_trace(place, profiler_options=options)
        for _ in range(16 // decode_steps):
            engine.step()
        jax.profiler.stop_trace()
        (path,) = glob.glob(f"{place}/**/*.xplane.pb", recursive=True)
        calls[decode_steps] = dict(read_profile(path).calls)
    return calls


@pytest.mark.gpu
def test_graphs_are_launched_as_they_are(tmp_path):
    if (gpu := current_gpu()) is None or not gpu.is_hopper:
        pytest.skip("needs a Hopper GPU")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_enable_command_buffers_during_profiling=true"
    environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    calls = f"test_engine_gpu.calls_of_decode_steps({str(tmp_path)!r})"
    code = f"import json; from tests import test_engine_gpu; print(json.dumps({calls}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    calls = json.loads(done.stdout.splitlines()[-1])
    assert calls["1"]["cuGraphLaunch"] >= 15
    assert calls["4"]["cuGraphLaunch"] >= 12
    # Each launch had its update when token ids pushed the temporaries about. A few are left: the graph around the loop
    # of four steps, and now and then the inputs, which lie elsewhere if the device lags behind the host.
    for found in calls.values():
        assert found.get("command_buffer::update", 0) < found["cuGraphLaunch"] / 2


def tokens_of_a_start(*, may_lower: bool) -> list[list[int]]:
    """What a new engine answers, all of whose programs are compiled or found before."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = Llama(tiny_config(**heads, hidden_size=64, intermediate_size=128), rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
    engine = Engine(
        model,
        EngineConfig(
            cache=CacheConfig(page_size=16, num_pages=65),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256),
            token_buckets=(1, 4, 64),
            recompile="error",
        ),
    )
    if not may_lower:

        def refuse(*args):
            raise LookupError("it is traced")

        engine._runner.lower = refuse  # type: ignore[method-assign]
    engine.warm_up()
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), request_id=f"{index}")
    outputs = {}
    while engine.has_work:
        outputs.update((output.request_id, list(output.token_ids)) for output in engine.step())
    return [outputs[f"{index}"] for index in range(len(PROMPTS))]


@pytest.mark.gpu
def test_a_later_process_finds_all_programs(tmp_path):
    """Among them those with kernels of our own, which it never lowered."""
    if (gpu := current_gpu()) is None or not gpu.is_hopper:
        pytest.skip("needs a Hopper GPU")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    answers = []
    for may_lower in (True, False):
        start = f"test_engine_gpu.tokens_of_a_start(may_lower={may_lower})"
        code = f"import json; from tests import test_engine_gpu; print(json.dumps({start}))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers[0] == answers[1]

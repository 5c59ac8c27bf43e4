"""The engine on a GPU of the Hopper kind, where it runs the kernel for it."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.engine import Engine
from jpaged.models import Llama
from jpaged.pallas_kernels.compat import current_gpu
from jpaged.request import SamplingParams
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
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=64)
    model = Llama(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
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

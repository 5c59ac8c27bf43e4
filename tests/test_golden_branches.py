"""jpaged against Hugging Face transformers in float32: a small random model for each branch of the architecture.

The values are in tests/golden/tiny.json, made by scripts/make_golden.py, which says how. Tokens must be equal; logits
and log-probabilities must be within 1e-4, to see an epsilon.
"""

import functools
import json

import numpy as np
import pytest

from tests.golden import GOLDEN, near, tiny_models, whole

TINY = {entry["name"]: entry for entry in json.loads((GOLDEN / "tiny.json").read_text())["models"]}
ATOL = 1e-4
# Compiling a step takes longest. These seven hold every branch between them; the others go through pages when
# slow tests are asked for.
THROUGH_PAGES = ("mha", "mqa", "odd_heads", "rope_parameters", "llama32_like", "bias_mqa_linear_tied", "mistral")


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory):
    """Of a name, the golden entry and the model, read from a folder as Hugging Face writes it."""
    from safetensors.numpy import save_file

    from jpaged.models import load_model

    @functools.cache
    def load(name: str):
        entry = TINY[name]
        tensors = tiny_models.weights(entry["config"], entry["seed"])
        assert tiny_models.digest(tensors) == entry["sha256"], "numpy draws other weights than for the golden values"
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(entry["config"]))
        save_file(tensors, folder / "model.safetensors")
        return entry, load_model(folder, dtype="float32")

    return load


def test_there_are_golden_values_of_every_variant() -> None:
    assert list(TINY) == list(tiny_models.VARIANTS)


@pytest.mark.parametrize("name", list(TINY))
def test_tiny_dense_logits_equal_transformers(load_tiny, name: str) -> None:
    import jax.numpy as jnp
    from flax import nnx

    entry, model = load_tiny(name)
    longest = max(len(whole(run)) for run in entry["runs"])
    rows = jnp.array([whole(run) + [0] * (longest - len(whole(run))) for run in entry["runs"]], jnp.int32)
    made = np.asarray(nnx.jit(lambda model, rows: model.causal_logits(rows))(model, rows))
    for run, row in zip(entry["runs"], made, strict=True):
        logits = row[len(run["token_ids"]) - 1 : len(whole(run))]
        near(logits[0], run["first_logits"], ATOL, name)
        near(logits[-1], run["last_logits"], ATOL, name)
        assert logits.argmax(1).tolist() == run["output_token_ids"]


@pytest.mark.parametrize(
    "name", [name if name in THROUGH_PAGES else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
)
def test_tiny_tokens_and_logprobs_through_pages_equal_transformers(load_tiny, name: str) -> None:
    """Twenty pages of 8 tokens are too few for the three requests: one is preempted and computed again.

    Not so with a sliding window, whose requests keep a few pages each.
    """
    from jpaged import LLM, CacheConfig, EngineConfig, SamplingParams, SchedulerConfig

    entry, model = load_tiny(name)
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=20),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128),
        token_buckets=(32,),
        check_invariants=True,
    )
    llm = LLM(model, config=config, progress=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    outputs = llm.generate([run["token_ids"] for run in entry["runs"]], params)
    for run, output in zip(entry["runs"], outputs, strict=True):
        assert list(output.token_ids) == run["output_token_ids"]
        want = np.array(run["chosen_logits"]) - np.array(run["log_normalizer"])
        near([got.logprob for got in output.logprobs or ()], want, ATOL, name)
    if model.sliding_window is None:
        assert sum(output.num_preemptions for output in outputs) > 0

"""jpaged against Hugging Face transformers in float32: the default model. (Small ones: tests/test_golden_branches.py.)

The values are in tests/golden/*.json, made by scripts/make_golden.py, which says how. Tokens must be equal; logits and
log-probabilities must be within 1e-3.
"""

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.golden import GOLDEN, near, whole

SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text())
BEAM = [entry for entry in json.loads((GOLDEN / "beam.json").read_text())["prompts"] if entry["model"] == "smollm2"]
PROMPTS = SMOLLM2["prompts"]
ATOL = 1e-3


def test_the_golden_values_cover_what_they_promise() -> None:
    kinds = [entry["kind"] for entry in PROMPTS]
    assert {kind: kinds.count(kind) for kind in kinds} == {"long": 4, "multibyte": 4, "multiturn": 4, "short": 12}
    assert all(len(entry["token_ids"]) > 1500 for entry in PROMPTS if entry["kind"] == "long")
    assert all(len(entry["output_token_ids"]) == len(entry["top_ids"]) == 64 for entry in PROMPTS)
    assert min(len(entry["token_ids"]) for entry in PROMPTS) == 1
    # A token is evidence only if float32 can tell it from the second.
    assert SMOLLM2["smallest_gaps"][0][0] > 2 * SMOLLM2["provenance"]["float32_noise"]


# --- the default model ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(smollm2_path):
    from jpaged.models import load_model

    return load_model(smollm2_path, dtype="float32")


@pytest.fixture(scope="module")
def llm(model, smollm2_path):
    """Takes all 24 requests at once: rows of 1 to 1,602 tokens, prompts cut into chunks."""
    from jpaged import LLM, CacheConfig, EngineConfig, SchedulerConfig

    config = EngineConfig(
        cache=CacheConfig(num_pages=600),
        scheduler=SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=512, max_model_len=1664),
        token_buckets=(24, 512),
        max_logprobs=24,  # of six beams with three stop ids
        check_invariants=True,
    )
    return LLM(model, tokenizer=smollm2_path, config=config, progress=False)


# A long prompt takes as long as all short ones, so one of the four stands for the others, unless slow tests are asked
# for.
OTHER_LONG = ("long_inventory", "long_story", "long_module")
AT_ONCE = [
    pytest.param([entry for entry in PROMPTS if entry["name"] not in OTHER_LONG], id="one-long"),
    pytest.param(PROMPTS, id="all", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=AT_ONCE)
def answered(request, llm):
    """Golden entries and the outputs of one batch, in pairs."""
    from jpaged import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5)
    outputs = llm.generate([entry["token_ids"] for entry in request.param], params)
    return list(zip(request.param, outputs, strict=True))


@pytest.fixture(scope="module")
def forced_logits(model):
    """Of golden entries, each prompt's logits [64, V] by dense causal attention over prompt and golden tokens.

    All entries of one call share one row, as segments.
    """
    import jax.numpy as jnp
    from flax import nnx

    run = nnx.jit(lambda model, tokens, segments: model.causal_logits(tokens, segment_ids=segments)[0])

    def forced(entries: list[dict[str, Any]]) -> list[np.ndarray]:
        tokens = [token for entry in entries for token in whole(entry)]
        segments = [index for index, entry in enumerate(entries) for _ in whole(entry)]
        made = np.asarray(run(model, jnp.array([tokens], jnp.int32), jnp.array([segments], jnp.int32)))
        ends = np.cumsum([len(whole(entry)) for entry in entries])
        return [made[end - len(entry["output_token_ids"]) : end] for entry, end in zip(entries, ends, strict=True)]

    return forced


@pytest.mark.parametrize(
    "names",
    [
        # Of each kind every second; the tests of one batch below check tokens and log-probabilities of them all.
        pytest.param([entry["name"] for entry in PROMPTS if entry["kind"] != "long"][::2], id="short"),
        pytest.param(
            [entry["name"] for entry in PROMPTS if entry["kind"] != "long"][1::2], id="more", marks=pytest.mark.slow
        ),
        pytest.param(["long_inventory"], id="long_inventory"),
        # Half a minute each.
        pytest.param(["long_log"], id="long_log", marks=pytest.mark.slow),
        pytest.param(["long_story"], id="long_story", marks=pytest.mark.slow),
        pytest.param(["long_module"], id="long_module", marks=pytest.mark.slow),
    ],
)
def test_dense_logits_equal_transformers(forced_logits, names: list[str]) -> None:
    entries = [entry for entry in PROMPTS if entry["name"] in names]
    for entry, logits in zip(entries, forced_logits(entries), strict=True):
        near(np.take_along_axis(logits, np.array(entry["top_ids"]), 1), entry["top_logits"], ATOL, entry["name"])
        sample = logits[SMOLLM2["sample_positions"]][:, SMOLLM2["sample_ids"]]
        near(sample, entry["sample_logits"], ATOL, entry["name"])
        assert logits.argmax(1).tolist() == entry["output_token_ids"], entry["name"]


def test_tokenizer_and_chat_template_equal_transformers(llm) -> None:
    for entry in PROMPTS:
        assert list(llm.tokenizer.encode(entry["text"])) == entry["token_ids"], entry["name"]
        assert llm.tokenizer.decode(entry["token_ids"], skip_special_tokens=False) == entry["text"], entry["name"]
        if "messages" in entry:
            assert llm.tokenizer.apply_chat_template(entry["messages"]) == entry["text"], entry["name"]


def test_tokens_of_one_batch_equal_transformers(answered) -> None:
    wrong = {}
    for entry, output in answered:
        assert output.finish_reason == "length"
        if list(output.token_ids) != entry["output_token_ids"]:
            pairs = zip(output.token_ids, entry["output_token_ids"], strict=True)
            first = next(i for i, (got, want) in enumerate(pairs) if got != want)
            wrong[entry["name"]] = f"differs from token {first} on, where the golden gap is {entry['gaps'][first]}"
    assert not wrong


def test_top_logprobs_equal_transformers(answered) -> None:
    for entry, output in answered:
        want = np.array(entry["top_logits"]) - np.array(entry["log_normalizer"])[:, None]
        for position, (got, ids, values) in enumerate(zip(output.logprobs, entry["top_ids"], want, strict=True)):
            what = f"{entry['name']}, token {position}"
            assert got.token_id == ids[0], what
            near(got.logprob, values[0], ATOL, what)
            # The n-th largest value is as stable as the values are, the id that has it is not: ids may swap in a tie.
            near([logprob for _, logprob in got.top], values, ATOL, what)
            golden = dict(zip(ids, values, strict=True))
            for token, logprob in got.top:
                near(logprob, golden.get(token, values[-1]), ATOL, f"{what}, id {token}")


def test_scores_equal_transformers(llm) -> None:
    want = SMOLLM2["score"]
    (score,) = llm.score([want["text"]])
    assert list(score.token_ids) == want["token_ids"]
    near(score.logprobs, want["logprobs"][1:], ATOL, "score")
    assert score.perplexity == pytest.approx(want["perplexity"], rel=1e-4)


@pytest.mark.parametrize("every", [pytest.param(9, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_beam_search_equals_transformers(llm, every: int) -> None:
    """Beams are forks that share pages; many searches at once, in one pool."""
    from jpaged import SamplingParams

    searches = [(entry, search) for entry in BEAM for search in entry["searches"]]
    # Each prompt is searched 27 times: the offset takes another combination of each.
    searches = [pair for index, pair in enumerate(searches) if index % every == index // 27 % every]
    assert {search["width"] for _, search in searches} == {2, 4, 6}
    params = [
        SamplingParams(
            temperature=0,
            use_beam_search=True,
            n=len(search["token_ids"]),
            best_of=search["width"],
            length_penalty=search["length_penalty"],
            early_stopping=search["early_stopping"],
            max_tokens=entry["max_tokens"],
            min_tokens=entry["min_tokens"],
            stop_token_ids=entry["stop_token_ids"],
            ignore_eos=True,
        )
        for entry, search in searches
    ]
    copied = llm.stats().num_copied_pages
    outputs = llm.generate([entry["token_ids"] for entry, _ in searches], params)
    for (entry, search), output in zip(searches, outputs, strict=True):
        what = f"{entry['name']} {search['width']} {search['length_penalty']} {search['early_stopping']}"
        assert [list(completion.token_ids) for completion in output.completions] == search["token_ids"], what
        near([completion.score for completion in output.completions], search["scores"], ATOL, what)
    assert llm.stats().num_copied_pages > copied


def test_it_answers_in_the_form_that_is_asked_for(llm) -> None:
    from jpaged import SamplingParams
    from jpaged.structured import StructuredOutput

    name, age = {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 150}
    fields = {"type": "object", "properties": {"name": name, "age": age}, "required": ["name", "age"]}
    forms = [
        StructuredOutput(json=fields | {"additionalProperties": False}),
        StructuredOutput(choice=["yes", "no"]),
        StructuredOutput(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    ]
    questions = ["Describe a person as JSON.", "Is the sky blue?", "On which date did the year 2000 begin?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = [SamplingParams(temperature=0, max_tokens=60, structured=form) for form in forms]
    outputs = llm.chat(messages, params)
    assert [output.finish_reason for output in outputs] == ["stop"] * 3
    person = json.loads(outputs[0].text)
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 150
    assert outputs[1].text in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", outputs[2].text)

"""The cost model of preemption, and the file that its constants come from."""

import json

import pytest

from jpaged.errors import ConfigError
from jpaged.preemption import PreemptionCosts

COSTS = {"prefill_s_per_token": 1e-4, "swap_s": 2e-3, "swap_s_per_page": 1e-4}


@pytest.mark.parametrize(
    ("num_tokens", "num_pages", "swaps"),
    [(1, 1, False), (21, 1, False), (22, 1, True), (160, 10, True), (160, 140, False), (160, 139, True), (0, 0, False)],
)
def test_the_cheaper_way_is_taken(num_tokens, num_pages, swaps):
    costs = PreemptionCosts(prefill_s_per_token=1.0, swap_s=20.0, swap_s_per_page=1.0)
    assert costs.prefers_swap(num_tokens=num_tokens, num_pages=num_pages) is swaps


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None, 10**400])
def test_a_constant_must_be_a_number_of_seconds(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*, expected a positive number of seconds"):
        PreemptionCosts(**{**COSTS, name: value})


def test_the_constants_are_read_from_what_the_script_printed(tmp_path):
    path = tmp_path / "costs.json"
    found = {"script": "bench_swap", **COSTS, "results": {"pages": [{"n": 64}]}}
    for text in (json.dumps(found), json.dumps(found, indent=2), f"tokens  ms\n  1     2\n{json.dumps(found)}\n"):
        path.write_text(text)
        assert PreemptionCosts.load(path) == PreemptionCosts.load(str(path)) == PreemptionCosts(**COSTS)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no preemption costs in .*: Expecting value"),
        ("tokens  ms\n  1     2\n", "no preemption costs in .*: Expecting value"),
        ("tokens  ms\n{}", "expected an object with prefill_s_per_token"),
        ("[1, 2, 3]", "expected an object with prefill_s_per_token, swap_s, swap_s_per_page"),
        ('{"swap_s": 1}', "expected an object with prefill_s_per_token"),
        (json.dumps({**COSTS, "swap_s": -1}), "swap_s is -1, expected a positive number"),
        (json.dumps({**COSTS, "swap_s": None}), "swap_s is None"),
    ],
)
def test_a_file_without_them_is_refused(tmp_path, text, match):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        PreemptionCosts.load(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no preemption costs in .*none.json: .*No such file"):
        PreemptionCosts.load(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"no preemption costs in .*bytes.json"):
        PreemptionCosts.load(tmp_path / "bytes.json")

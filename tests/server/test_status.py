"""Models, tokens, metrics, the pool's picture, the OpenAPI document."""

import json
import re

import pytest

from tests.server.tiny_model import ids


def test_models(server) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "other-name"]
    card = server.http.get("/v1/models/other-name").json()
    assert card == listed["data"][1]
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "tiny", 256)
    assert server.http.get("/v1/models/gpt").status_code == 404


def test_health_version_load(server) -> None:
    from jpaged import __version__

    for path in ("/health", "/ping"):
        response = server.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/load").json() == {"server_load": 1}  # itself


def test_tokenize(server) -> None:
    answer = server.http.post("/tokenize", json={"prompt": "é", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 256, "tokens": ids("é"), "token_strs": ["Ã", "©"]}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert tokens == [1, *ids("user\nHi"), 2, *ids("\n")]
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    for body in ({}, {"prompt": "a", "messages": messages}):
        assert server.http.post("/tokenize", json=body).status_code == 400


def test_detokenize(server) -> None:
    assert server.http.post("/detokenize", json={"tokens": [1, *ids("é")]}).json() == {"prompt": "<|im_start|>é"}
    assert server.http.post("/detokenize", json={"tokens": [299]}).json() == {"prompt": ""}
    assert server.http.post("/detokenize", json={"tokens": [300]}).status_code == 400


@pytest.mark.parametrize("vllm", [False, True])
def test_metrics(start, vllm) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with start(vllm_metric_names=vllm) as server:
        server.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1})
        server.http.post("/v1/completions", json={"prompt": ""})
        response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert any(name.startswith("vllm:") for name in families) == vllm
    for prefix in ("jpaged:", "vllm:") if vllm else ("jpaged:",):
        values = {
            (sample.name.removeprefix(prefix), *sorted(sample.labels.values())): sample.value
            for family in families.values()
            if family.name.startswith(prefix)
            for sample in family.samples
        }
        assert values["request_success_total", "length", "tiny"] == 1
        assert values["http_responses_total", "/v1/completions", "200"] == 1
        assert values["http_responses_total", "/v1/completions", "400"] == 1
        assert values["prompt_tokens_total", "tiny"] == 7
        assert values["kv_cache_usage_perc", "tiny"] == 2 / 64
        assert values["time_to_first_token_seconds_bucket", "0.1", "tiny"] == 0
        assert values["time_to_first_token_seconds_bucket", "+Inf", "tiny"] == 1
        assert values["time_to_first_token_seconds_count", "tiny"] == 1
        assert values["engine_up",] == 1
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "num_preemptions_total",
            "prefix_cache_hits_total",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
        ):
            assert (name, "tiny") in values
        info = (
            families[f"{prefix}cache_config_info"]
            if f"{prefix}cache_config_info" in families
            else families[f"{prefix}cache_config"]
        )
        assert info.samples[0].labels["page_size"] == "16"
    assert "process_resident_memory_bytes" in families


def test_metrics_have_no_labels_of_clients(server) -> None:
    for path in ("/a-path-of-mine", "/v1/models/a-model-of-mine"):
        server.http.get(path)
    text = server.http.get("/metrics").text
    assert "of-mine" not in text
    assert re.search(r'http_responses_total\{path="other",status="404"\} [1-9]', text)


def test_picture_of_the_pool(server) -> None:
    state = server.http.get("/internal/state").json()
    assert state["pages"] == "41230"
    assert (state["model"], state["info"]["page_size"], state["stats"]["num_pages"]) == ("tiny", 16, 65)
    assert state["requests"] == []
    assert 0 <= state["age_s"] < 60


def test_openapi_document_names_every_parameter(server) -> None:
    document = server.http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False
        assert all(parameter["description"] for parameter in schema["properties"].values())
        assert "400" in operation["responses"]
    assert "security" not in json.dumps(document)

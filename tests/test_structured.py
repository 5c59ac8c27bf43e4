"""What a `StructuredOutput` may say, and what is refused at once."""

import json
from types import MappingProxyType

import pytest

from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from jpaged.structured import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutput

SCHEMA = {"type": "object", "properties": {"é": {"enum": ["x", 1, None]}}}


class TestTaken:
    @pytest.mark.parametrize("schema", [SCHEMA, MappingProxyType(SCHEMA), json.dumps(SCHEMA)], ids=lambda s: type(s))
    def test_a_schema_is_kept_as_text(self, schema):
        made = StructuredOutput(json=schema)
        assert isinstance(made.json, str)
        assert json.loads(made.json) == SCHEMA
        assert made.kind == "json"

    def test_equal_forms_are_equal_and_hash_alike(self):
        one, other = (StructuredOutput(choice=choice) for choice in (["a", "b"], ("a", "b")))
        assert one == other
        assert hash(one) == hash(other)
        assert hash(StructuredOutput(json=SCHEMA)) == hash(StructuredOutput(json=dict(SCHEMA)))

    @pytest.mark.parametrize(
        ("fields", "kind"),
        [({"json_object": True}, "json_object"), ({"regex": "a"}, "regex"), ({"grammar": 'start: "a"'}, "grammar")],
    )
    def test_kinds(self, fields, kind):
        assert StructuredOutput(**fields).kind == kind

    def test_a_text_of_the_longest_length(self):
        assert StructuredOutput(regex="a" * MAX_TEXT_BYTES).kind == "regex"


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "structured has nothing, expected exactly one of json, json_object, regex, choice and grammar"),
            ({"json_object": False}, "structured has nothing"),
            ({"regex": "a", "choice": ["a"]}, "structured has regex and choice, expected exactly one"),
            ({"json_object": 1}, "structured.json_object is 1, expected True or False"),
            ({"disable_any_whitespace": "yes", "json_object": True}, "disable_any_whitespace is 'yes'"),
            ({"disable_any_whitespace": True, "regex": "a"}, "disable_any_whitespace is set with regex"),
            ({"regex": ""}, "structured.regex is '', expected a non-empty string"),
            ({"regex": 3}, "structured.regex is 3, expected a non-empty string"),
            ({"grammar": b"start: x"}, "structured.grammar is b'start: x'"),
            ({"regex": "a\ud800"}, "structured.regex holds half of a surrogate pair at 1"),
            ({"regex": "é" * (MAX_TEXT_BYTES // 2 + 1)}, f"has {MAX_TEXT_BYTES + 2} bytes, expected at most"),
            ({"json": "{"}, "structured.json is no JSON text"),
            ({"json": '{"a": NaN}'}, "structured.json is no JSON text: NaN is no JSON"),
            ({"json": "[" * 100_000}, "structured.json"),
            ({"json": "[1]"}, "structured.json holds '.1.', expected a JSON object"),
            ({"json": 7}, "structured.json is 7, expected a JSON schema"),
            ({"json": {"enum": [float("nan")]}}, "structured.json cannot be written as JSON"),
            ({"json": {"enum": [object()]}}, "structured.json cannot be written as JSON"),
            ({"json": {"enum": ["a" * MAX_TEXT_BYTES]}}, "structured.json has .* bytes, expected at most"),
            ({"choice": "yes"}, "structured.choice is 'yes', expected a list of strings"),
            ({"choice": []}, "structured.choice is .*, expected a list of strings"),
            ({"choice": ["a", ""]}, "structured.choice is '', expected a non-empty string"),
            ({"choice": ["a", 1]}, "structured.choice is 1, expected a non-empty string"),
            ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"has {MAX_CHOICES + 1} entries, expected at most {MAX_CHOICES}"),
            ({"choice": ["a" * (MAX_TEXT_BYTES - 1), "bb"]}, "bytes in all, expected at most"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_names_the_field(self, fields, message):
        with pytest.raises(RequestError, match=message) as caught:
            StructuredOutput(**fields)
        assert len(str(caught.value)) < 300  # however long what was given is

    def test_a_schema_without_an_end(self):
        schema: dict = {}
        schema["not"] = schema
        with pytest.raises(RequestError, match=r"structured\.json cannot be written as JSON"):
            StructuredOutput(json=schema)

    def test_sampling_parameters_take_nothing_else(self):
        with pytest.raises(RequestError, match="structured is 'a', expected StructuredOutput or None"):
            SamplingParams(structured="a")

    @pytest.mark.parametrize("field", [{"structured": StructuredOutput(regex="a")}, {"allowed_token_ids": [1]}])
    def test_beam_search_follows_no_masks(self, field):
        with pytest.raises(RequestError, match=f"{next(iter(field))} is set with use_beam_search"):
            SamplingParams(temperature=0, use_beam_search=True, best_of=2, **field)

import datetime
from typing import Any

import pytest

from jpaged import chat_template
from jpaged.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate, check_messages
from jpaged.errors import ChatTemplateError, RequestError
from tests.tiny_vocabs import CHATML

USER = [{"role": "user", "content": "Hi"}]
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def render(text: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_messages_become_a_prompt() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render(LLAMA2, [*USER, {"role": "assistant", "content": "Yo"}]) == "<s>[INST] Hi [/INST] Yo </s>"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert (
        render("{% if true %}\n  {%- for m in messages %}\n{{ m.content }}\n    {% endfor %}\n{% endif %}\n") == "Hi\n"
    )


def test_what_templates_may_use() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% for m in messages %}{% if loop.first %}{% break %}{% endif %}x{% endfor %}") == ""
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n * 2 ** 2 }}{{ 'ab' * 2 }}") == "8abab"
    assert render("{{ 'a' ~ 1 ~ none }}{{ 2.0 * 3 }}{{ [1] + [2] }}{{ 2 ** 0.5 > 1 }}") == "a1None6.0[1, 2]True"
    assert render("{% for i in range(3) %}{{ i }}{% endfor %}{{ unk_token }}") == "012"


def test_tools_and_variables_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}think{% endif %}"
    assert render(text, tools=tools, enable_thinking=True) == '[{"type": "function", "function": {"name": "f"}}]think'
    assert render(text, tools=[]) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{}]}, "does not use tools"),
        ({"enable_thinking": True}, "does not use enable_thinking; it uses add_generation_prompt, messages"),
        ({"tools": "f"}, "tools is 'f'"),
        ({"tools": ["f"]}, "expected a list of JSON schemas"),
        ({"continue_final_message": True}, "add_generation_prompt are both set"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render(CHATML, **options)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("Hi", "non-empty list"),
        ({"role": "user", "content": "Hi"}, "non-empty list"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([*USER, {"content": "Hi"}], r"messages\[1\] has the role None"),
        ([{"role": 3, "content": "Hi"}], "role 3"),
        ([{"role": "user"}], "content None"),
        ([{"role": "user", "content": 5}], "content 5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "reads text only"),
        ([{"role": "user", "content": ["Hi"]}], "type 'str'"),
        ([{"role": "user", "content": "Hi", "extra": object()}], "JSON"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render(CHATML, messages)


def test_messages_are_copied_and_made_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    assert check_messages(given) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "tool_calls": [{"id": "1"}], "content": ""},
    ]
    assert given[0]["content"] is parts


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (CHATML, "Well, ", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "),
        (LLAMA2, "Well, ", "<s>[INST] Hi [/INST] Well,"),
        (LLAMA2, "Well", "<s>[INST] Hi [/INST] Well"),
    ],
)
def test_the_final_message_can_be_continued(template: str, content: str, expected: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    assert render(template, messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages[-1]["content"] == content


def test_a_final_message_that_is_left_out_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out the final message"):
        render("{{ messages[0].role }}", add_generation_prompt=False, continue_final_message=True)


def test_the_templates_own_words_are_in_the_error() -> None:
    with pytest.raises(ChatTemplateError, match="refused the messages: Only user and assistant roles are supported!"):
        render(LLAMA2, [{"role": "system", "content": "Be kind"}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ nothing.here }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro again(n) %}{{ again(n) }}{% endmacro %}{{ again(1) }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "more than 100000 items"),
        ("{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}", "more than 100000 items"),
        ("{{ 'a' * 10**9 }}", r"result of \* is too large"),
        ("{{ 9 ** 1000000000 }}", r"result of \*\* is too large"),
        ("{% set s = namespace(n=2) %}{% for i in range(99) %}{% set s.n = s.n * s.n %}{% endfor %}", "too large"),
        ("{% set s = namespace(t='aa') %}{% for i in range(99) %}{% set s.t = s.t ~ s.t %}{% endfor %}", "of ~ is too"),
        ("{% set s = namespace(t='aa') %}{% for i in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}", "too large"),
        ("{% for i in range(99) %}{{ 'a' * 10**6 }}{% endfor %}", f"longer than {MAX_RENDERED_CHARACTERS}"),
    ],
)
def test_templates_that_fail_or_run_away_are_stopped(text: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(text)


def test_loops_are_counted_whatever_they_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_LOOP_TURNS", 50)
    text = "{% for m in messages %}{% for c in m.content %}{{ loop.index }}/{{ loop.length }}{% endfor %}{% endfor %}"
    template = ChatTemplate(text)
    question = [{"role": "user", "content": "x" * 49}]
    assert template.render(question, add_generation_prompt=False).endswith("49/49")
    with pytest.raises(ChatTemplateError, match="more than 50 turns"):
        template.render(question * 2, add_generation_prompt=False)
    with pytest.raises(ChatTemplateError, match=r"_bounds|counted"):
        ChatTemplate("{% set _bounds = 1 %}{% for m in messages %}{% endfor %}").render(question)


def test_a_rendering_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", -1.0)
    question = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(ChatTemplateError, match="takes longer than"):
        ChatTemplate("{% for c in messages[0].content %}{% endfor %}").render(question)


@pytest.mark.parametrize(("text", "words"), [("\n{% if %}", "line 2"), ("{{ 'a' | nope }}", "nope")])
def test_templates_that_are_no_templates_are_refused(text: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(text)

"""docs/server.md names every parameter and every setting."""

import re
from dataclasses import fields
from pathlib import Path

from jpaged.server.config import ServerConfig
from jpaged.server.kinds import Ignored, Neutral
from jpaged.server.parameters import Limits, Table, chat_parameters, completion_parameters

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
LIMITS = Limits(
    models=("m",), vocab_size=9, max_model_len=9, max_logprobs=20, max_n=1, max_prompts=1, has_priorities=True
)


def rows(table: Table) -> list[str]:
    """The rows of the page's table of parameters."""
    found = []
    for name, parameter in table.items():
        if isinstance(parameter.kind, Ignored | Neutral):
            continue
        default = parameter.default
        text = "required" if parameter.required else "" if default is None else str(default).lower()
        found.append(f"| `{name}` | {text} | {parameter.about} |")
    return found


def section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n### {title}\n")[1].split("\n##")[0]


def test_parameters() -> None:
    completions, chat = completion_parameters(LIMITS), chat_parameters(LIMITS)
    both = {name: one for name, one in completions.items() if name in chat and chat[name].about == one.about}
    own = {name: one for name, one in completions.items() if name not in both}
    for title, table in (
        ("Of both", both),
        ("Of completions alone", own),
        ("Of chats alone", {name: one for name, one in chat.items() if name not in both}),
    ):
        expected = rows(table)
        assert re.findall(r"^\| `.*\|$", section(title), re.MULTILINE) == expected, "\n".join(["", *expected])


def test_what_is_ignored_or_refused() -> None:
    tables = {**completion_parameters(LIMITS), **chat_parameters(LIMITS)}
    for title, kind in (("Taken and ignored", Ignored), ("Known and refused", Neutral)):
        names = {name for name, parameter in tables.items() if isinstance(parameter.kind, kind)}
        assert set(re.findall(r"^\| `(\w+)`", section(title), re.MULTILINE)) == names


def test_every_setting_is_an_option() -> None:
    from jpaged.cli.serve import ServerOptions

    constant = {
        "models",
        "body_timeout_s",
        "max_prompts",
        "max_n",
        "reading_timeout_s",
        "keep_alive_s",
        "send_timeout_s",
    }
    assert {field.name for field in fields(ServerConfig)} - constant == {field.name for field in fields(ServerOptions)}


def test_every_metric_is_named_and_no_other() -> None:
    from tests.test_deploy import exported

    names = {name.removeprefix("jpaged:") for name in exported() if name.startswith("jpaged:")}
    ends = re.compile("_(bucket|sum|count|created)$")
    histograms = {ends.sub("", name) for name in names if name.endswith("_bucket")}
    others = {name.removesuffix("_total") for name in names if ends.sub("", name) not in histograms}
    told = PAGE.read_text(encoding="utf-8").split("\n## Metrics\n")[1]
    rows = re.findall(r"^\| (`.*?`) \|", told, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(histograms | others)

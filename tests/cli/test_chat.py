"""`jpaged chat`: turns from a pipe, and a terminal with Ctrl-C."""

from pathlib import Path

import pytest

from jpaged.cli.conversation import Conversation
from jpaged.errors import ChatTemplateError
from tests.cli.conftest import SMALL

LIMITS = SMALL[2:]  # a chat runs one request at a time


class OneTokenAWord:
    """Counts words, so that lengths can be told by looking; refuses messages that say "refuse"."""

    def encode_chat(self, messages) -> list[int]:
        text = " ".join(message["content"] for message in messages)
        if "refuse" in text:
            raise ChatTemplateError("refused")
        return list(range(len(text.split())))


def roles(conversation: Conversation) -> str:
    return "".join(message["role"][0] for message in conversation.messages)


def test_a_conversation_grows_by_questions_and_answers() -> None:
    talk = Conversation(OneTokenAWord(), max_prompt_tokens=100, system="be brief")
    assert talk.ask("one two three") == ([0, 1, 2, 3, 4], 0)
    talk.answer("four")
    assert len(talk.ask("five")[0]) == 7
    assert roles(talk) == "suau"
    talk.retract()
    assert roles(talk) == "sua"
    talk.reset()
    assert roles(talk) == "s"


def test_the_oldest_turns_are_dropped_and_the_system_message_stays() -> None:
    talk = Conversation(OneTokenAWord(), max_prompt_tokens=6, system="s")
    for question, dropped in (("a b", 0), ("c", 0), ("d", 2)):
        token_ids, count = talk.ask(question)
        assert (len(token_ids) <= 6, count) == (True, dropped)
        talk.answer("x")
    assert [message["content"] for message in talk.messages] == ["s", "c", "x", "d", "x"]


def test_a_question_that_is_too_long_alone_is_given_as_it_is() -> None:
    talk = Conversation(OneTokenAWord(), max_prompt_tokens=3)
    talk.ask("a")
    talk.answer("b")
    token_ids, dropped = talk.ask("1 2 3 4")
    assert (len(token_ids), dropped) == (4, 2)


def test_a_refused_question_is_not_kept() -> None:
    talk = Conversation(OneTokenAWord(), max_prompt_tokens=3)
    talk.ask("a")
    talk.answer("b")
    with pytest.raises(ChatTemplateError):
        talk.ask("refuse this")
    assert roles(talk) == "ua"


def test_answers_depend_on_what_was_said_before(jpaged, tiny_folder: Path) -> None:
    from jpaged import LLM, SamplingParams

    llm = LLM(tiny_folder, max_num_seqs=1, num_pages=65, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages, expected = [], []
    for question in ("Hi", "Why?"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.text})
        expected.append(output.text)
    result = jpaged("chat", "--model", tiny_folder, "--max-tokens", "8", *LIMITS, input="Hi\n\nWhy?\n/reset\nHi\n")
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{text}\n" for text in [*expected, expected[0]])
    assert result.stderr.count("cut off") == 3
    assert "forgotten" in result.stderr


def test_quit_ends_a_chat(jpaged, tiny_folder: Path) -> None:
    result = jpaged("chat", "--model", tiny_folder, "--max-tokens", "1", *LIMITS, input="/quit\nHi\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_unknown_commands_are_named_and_a_space_makes_them_text(jpaged, tiny_folder: Path) -> None:
    result = jpaged("chat", "--model", tiny_folder, "--max-tokens", "1", *LIMITS, input="/save me\n /save me\n")
    assert result.exit_code == 0
    assert "unknown command /save; /reset forgets" in result.stderr
    assert result.stdout.count("\n") == 1


def test_a_chat_outlives_a_refused_question_and_a_full_context(jpaged, tiny_folder: Path) -> None:
    lines = ("x" * 300, "a" * 60, "b" * 60, "c" * 60)
    result = jpaged("chat", "--model", tiny_folder, "--max-tokens", "8", *LIMITS, input="\n".join(lines))
    assert result.exit_code == 0
    errors = [line for line in result.stderr.splitlines() if "cut off" not in line]
    assert errors[0].startswith("jpaged: error: ")
    dropped = "the conversation no longer fits into the context: its 2 oldest messages are dropped"
    assert dropped in errors[1:]
    assert set(errors[1:]) == {dropped}
    assert result.stdout.count("\n") == 3


def test_ctrl_c_stops_an_answer_and_then_leaves(terminal, tiny_folder: Path) -> None:
    screen = terminal("chat", "--model", tiny_folder, "--max-tokens", "60000", "--num-pages", "4097", "--no-progress")
    banner = screen.wait_for("> ")
    assert "4097 pages" in banner
    assert "/reset" in banner
    screen.type("Hi\n")
    screen.wait_for("Hi\r\n")
    screen.wait_for_more()  # the answer has begun
    screen.type("\x03")
    screen.wait_for("> ")
    screen.type("/reset\n")
    screen.wait_for("forgotten")
    screen.wait_for("> ")
    assert screen.interrupt() == 130
    for word in ("Traceback", "cut off"):  # "cut off" would mean that the answer ran to its end
        assert word not in screen.shown


def test_ctrl_d_leaves(terminal, tiny_folder: Path) -> None:
    screen = terminal("chat", "--model", tiny_folder, *LIMITS)
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.exit_code() == 0

"""What llguidance makes of forms and of vocabularies, and that no form can end the process."""

import importlib.util
import re

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from jpaged.errors import RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.grammar import check_grammar, compile_grammar, grammar_vocabulary, run_with_deep_stack
from jpaged.structured import MAX_TEXT_BYTES, StructuredOutput
from jpaged.token_mask import unpack_mask
from jpaged.tokenizer import Tokenizer
from jpaged.vocabulary import Vocabulary
from tests.tiny_vocabs import byte_level_metadata, sentencepiece_metadata

SIZE = 300  # of the model's vocabulary: both are padded
WIDE = [{"type": "object", "properties": {f"a{i}{j}": {"const": i} for j in range(7)}} for i in range(7)]
METADATA = {"byte_level": byte_level_metadata(), "sentencepiece": sentencepiece_metadata()}


@pytest.fixture(scope="module", params=METADATA)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(gguf_vocabulary(METADATA[request.param], "tiny"), "tiny")


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return grammar_vocabulary(tokenizer, SIZE, tokenizer.eos_token_ids)


def follows(grammar, token_ids) -> bool:
    """Whether an output of these tokens, and then its end, is what the grammar wants."""
    matcher = grammar.matcher.deep_copy()
    return matcher.consume_tokens(list(token_ids)) and matcher.is_accepting()


def compiled(vocabulary, **form):
    return compile_grammar(StructuredOutput(**form), vocabulary)


class TestVocabulary:
    @pytest.mark.parametrize("text", ["hello world", "the he tin", "é", "日本 😀\n", "two words", "12 's"])
    def test_tokens_match_the_text_that_they_stand_for(self, tokenizer, vocabulary, text):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = vocabulary.decode_bytes(token_ids).decode()  # SentencePiece puts a space before it
        assert spelled.lstrip(" ") == text
        assert follows(compiled(vocabulary, choice=[spelled, "other"]), token_ids)
        assert not follows(compiled(vocabulary, choice=[spelled + "x"]), token_ids)

    def test_special_tokens_and_padding_are_no_text(self, tokenizer, vocabulary):
        allowed = set(unpack_mask(compiled(vocabulary, regex="(?s:.+)").first_mask))
        assert allowed
        assert not allowed & set(tokenizer.special_token_ids)
        assert not allowed & set(range(tokenizer.vocab_size, SIZE))

    def test_every_end_of_sequence_id_ends(self, tokenizer):
        vocabulary = grammar_vocabulary(tokenizer, SIZE, [2, 290])
        assert {2, 290} <= set(unpack_mask(compiled(vocabulary, regex="a*").first_mask))
        assert not {2, 290} & set(unpack_mask(compiled(vocabulary, regex="a+").first_mask))

    def test_a_model_with_fewer_tokens_than_the_tokenizer(self, tokenizer):
        vocabulary = grammar_vocabulary(tokenizer, 200, [2])
        assert compiled(vocabulary, regex="[a-z]+").first_mask.shape == (7,)

    def test_words_that_spaces_join_have_no_bytes(self):
        words = Tokenizer(Vocabulary(HfTokenizer(models.BPE({"h": 0, "i": 1}, [])), {}, (1,)), "words")
        with pytest.raises(RequestError, match="joined by spaces"):
            grammar_vocabulary(words, 2, [1])

    def test_forced_text_is_spelled_as_the_model_would(self, tokenizer, vocabulary):
        text = "hello the tin"
        spelled = tokenizer.encode("\n" + text, add_special_tokens=False)
        spelled = spelled[[vocabulary.decode_bytes([token]) for token in spelled].index(b"\n") + 1 :]
        assert self.forced(compiled(vocabulary, choice=[text])) == spelled

    @pytest.mark.parametrize("text", ["a<|im_end|>b", "a</s>b", "<tool>", "é two words"])
    def test_forced_text_is_text_even_if_it_names_a_special_token(self, tokenizer, vocabulary, text):
        token_ids = self.forced(compiled(vocabulary, choice=[text]))
        assert tokenizer.decode(token_ids) == text
        assert not set(token_ids) & set(tokenizer.special_token_ids)

    @staticmethod
    def forced(grammar) -> list[int]:
        """The output, where the masks leave no choice."""
        matcher, token_ids = grammar.matcher.deep_copy(), []
        while True:
            (token,) = unpack_mask(np.frombuffer(matcher.compute_bitmask(), np.uint32))
            assert matcher.consume_token(token)
            if matcher.is_stopped() and token == 2:
                return token_ids
            token_ids.append(token)


class TestForms:
    @pytest.mark.parametrize("choice", ["é", "😀", 'q"uote', "back\\slash", "new\nline", "\t", "{x}", "/a/", "a\0b"])
    def test_choices_are_taken_as_they_are(self, vocabulary, choice):
        grammar = compiled(vocabulary, choice=[choice, "other"])
        for text in (choice, "other", choice[:-1], choice + choice):
            assert follows(grammar, vocabulary.greedy_tokenize(text)) == (text in (choice, "other"))

    @pytest.mark.parametrize("text", ['{"a":1}', '{ "a" : 1 }', "{}", "[1]", "1", '{"a":1'])
    @pytest.mark.parametrize("compact", [False, True])
    def test_json_objects(self, vocabulary, text, compact):
        grammar = compiled(vocabulary, json_object=True, disable_any_whitespace=compact)
        wanted = text[:1] == "{" and text[-1:] == "}" and not (compact and " " in text)
        assert follows(grammar, vocabulary.greedy_tokenize(text)) == wanted

    @pytest.mark.parametrize("text", ["2024-02-29", "2024-2-29", "x2024-02-29", "2024-02-29x", ""])
    def test_a_regex_is_for_the_whole_output(self, vocabulary, text):
        pattern = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
        grammar = compiled(vocabulary, regex=pattern)
        assert follows(grammar, vocabulary.greedy_tokenize(text)) == bool(re.fullmatch(pattern, text))

    @pytest.mark.parametrize("source", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
    def test_grammars_in_lark_and_in_gbnf(self, vocabulary, source):
        grammar = compiled(vocabulary, grammar=source)
        for text, wanted in (("((x))", True), ("x", True), ("((x)", False), ("()", False)):
            assert follows(grammar, vocabulary.greedy_tokenize(text)) == wanted


class TestRefused:
    @pytest.mark.parametrize(
        ("form", "message"),
        [
            ({"regex": "(a"}, r"structured\.regex is refused: .*unclosed group"),
            ({"regex": "a(?=b)"}, "look-around, including look-ahead and look-behind, is not supported"),
            ({"json": {"type": "strin"}}, r"structured\.json is refused: Invalid type: strin"),
            ({"json": {"$ref": "#/$defs/x"}}, r"Pointer '/\$defs/x' does not exist"),
            ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
            ({"json": {"$ref": "http://localhost/x.json"}}, "retriever does not fetch"),
            ({"grammar": "start: foo"}, r"structured\.grammar is refused: .*unknown name"),
            ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, r"structured\.grammar is refused"),
            ({"json": {"allOf": [{"anyOf": [WIDE[i] for i in range(7)]}] * 7}}, "schema too large"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_with_llguidances_message_bounded(self, vocabulary, form, message):
        for check in (check_grammar, lambda form: run_with_deep_stack(lambda: compile_grammar(form, vocabulary))):
            with pytest.raises(RequestError, match=message) as caught:
                check(StructuredOutput(**form))
            assert len(str(caught.value)) < 500
            assert "\n" not in str(caught.value)

    def test_without_llguidance(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RequestError, match=r'need llguidance, .*: pip install "jpaged\[structured\]"'):
            check_grammar(StructuredOutput(regex="a"))

    def test_whatever_is_raised_on_the_deep_stack_arrives(self):
        with pytest.raises(ZeroDivisionError):
            run_with_deep_stack(lambda: 1 // 0)


def chain(line: str, last: str, start: str) -> StructuredOutput:
    """The longest chain of rules that a request may bring."""
    lines, size, index = [start], len(start) + len(last) + 8, 0
    while size + len(one := line.format(index, index + 1)) < MAX_TEXT_BYTES:
        lines.append(one)
        size += len(one) + 1
        index += 1
    return StructuredOutput(grammar="\n".join([*lines, last.format(index)]))


def references(count: int) -> StructuredOutput:
    """A schema that is one long chain of references."""
    links = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    return StructuredOutput(json={"$ref": "#/$defs/0", "$defs": links | {f"{count}": {}}})


@pytest.mark.parametrize(
    "form",
    [
        chain('a{}:"b" a{}?', 'a{}:"z"', "start: a0"),
        chain("A{}:A{}", 'A{}:"z"', "start: A0"),
        chain("A{}:~A{}", 'A{}:"z"', "start: A0"),
        references(1400),
    ],
    ids=["rules", "terminals", "negations", "references"],
)
def test_the_deepest_grammar_overflows_no_stack(form):
    """On an ordinary thread each of them ends the process; neither do the masks that come after."""
    tokenizer = Tokenizer(gguf_vocabulary(METADATA["byte_level"], "tiny"), "tiny")
    vocabulary = grammar_vocabulary(tokenizer, SIZE, [2])
    grammar = run_with_deep_stack(lambda: compile_grammar(form, vocabulary))
    matcher = grammar.matcher.deep_copy()
    mask = np.zeros_like(grammar.first_mask)
    for _ in range(3):
        matcher.consume_token(unpack_mask(grammar.first_mask)[-1])
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    assert grammar.first_mask.any()

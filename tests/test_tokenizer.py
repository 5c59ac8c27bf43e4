import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import ChatTemplateError, ModelLoadError, RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.tokenizer import IncrementalDecoder, Tokenizer
from tests.tiny_vocabs import byte_level_metadata, sentencepiece_metadata

GOLDEN = Path(__file__).parent / "golden" / "tokenizer_smollm2.json"
USER = [{"role": "user", "content": "hello"}]


def make(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(gguf_vocabulary(metadata, "test.gguf"), "test.gguf")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make(byte_level_metadata())


@given(text=st.text(max_size=40))
def test_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_batches_are_encoded_as_their_texts(tokenizer: Tokenizer) -> None:
    texts = ["hello", "", "two words", "é"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(byte_level_metadata()["tokenizer.ggml.tokens"])
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.token_to_id("nothing") is None
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_special_tokens_are_left_out_of_text_if_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>two words<|im_end|>")
    assert tokenizer.decode(ids) == "two words"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>two words<|im_end|>"


@pytest.mark.parametrize("ids", [[-1], [5, 10**6], [2**40], [0.5], ["a"]])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, ids: list[Any]) -> None:
    with pytest.raises(RequestError, match=rf"token id {ids[-1]!r} .* \[0, {tokenizer.vocab_size}\)"):
        tokenizer.decode(ids)


@pytest.mark.parametrize(("text", "words"), [(5, "is 5"), (None, "is None"), ("a\ud800", "surrogate")])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=words):
        tokenizer.encode_batch(["fine", text])


def test_a_batch_is_a_list(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="expected a list"):
        tokenizer.encode_batch("hello")


def test_chats_become_ids(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(USER)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(USER) == tokenizer.encode(text)
    assert tokenizer.encode_chat(USER, add_generation_prompt=False) == tokenizer.encode(text[: text.rindex("<|im_s")])


def test_a_template_that_writes_bos_gets_no_second_one() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make(sentencepiece_metadata(**{"tokenizer.chat_template": template}))
    assert tokenizer.encode("the").count(1) == 1
    assert tokenizer.encode_chat(USER).count(1) == 1


def test_named_templates_are_chosen() -> None:
    named = {"tokenizer.chat_template.tool_use": "{{ tools[0].name }}", "tokenizer.chat_template.brief": "brief"}
    tokenizer = make(byte_level_metadata(**named))
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "f"
    assert tokenizer.apply_chat_template(USER, chat_template="brief") == "brief"
    assert tokenizer.apply_chat_template(USER, chat_template="{{ messages[0].role }}") == "user"
    assert tokenizer.apply_chat_template(USER).startswith("<|im_start|>user")


def test_models_without_a_chat_template_say_so() -> None:
    with pytest.raises(ChatTemplateError, match=r"test\.gguf has no chat template: it may be a base model"):
        make(sentencepiece_metadata()).apply_chat_template(USER)
    only = make(sentencepiece_metadata(**{"tokenizer.chat_template.rag": "x"}))
    with pytest.raises(ChatTemplateError, match='no chat template "default", only rag'):
        only.apply_chat_template(USER)


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    metadata = sentencepiece_metadata()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_load_tells_files_from_folders(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    assert tokenizer.encode("the") == make(sentencepiece_metadata()).encode("the")
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        Tokenizer.load(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ModelLoadError, match="is no GGUF file"):
        Tokenizer.load(str(tmp_path / "notes.txt"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


def test_the_default_model_has_golden_ids(smollm2: Tokenizer) -> None:
    golden = json.loads(GOLDEN.read_text())
    for entry in golden["texts"]:
        assert smollm2.encode(entry["text"]) == entry["ids"], entry["text"]
        assert smollm2.decode(entry["ids"]) == entry["decoded"]
    for entry in golden["chats"]:
        assert smollm2.apply_chat_template(entry["messages"]) == entry["prompt"]
        assert smollm2.encode_chat(entry["messages"]) == entry["ids"]


@given(data=st.data())
def test_the_default_model_streams_what_it_decodes(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1) | st.integers(0, 300), max_size=30))
    decoder = IncrementalDecoder(smollm2)
    assert "".join(decoder.add(token_id) for token_id in ids) + decoder.finish() == smollm2.decode(ids)

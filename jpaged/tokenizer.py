"""Text to token ids and back, and chats to prompts."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from jpaged.chat_template import ChatTemplate
from jpaged.errors import ChatTemplateError, ModelLoadError, RequestError
from jpaged.folder_vocab import folder_vocabulary
from jpaged.gguf_file import GGUFFile, is_gguf
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.incremental_decoder import DecodePlan, IncrementalDecoder
from jpaged.vocabulary import Vocabulary

__all__ = ["IncrementalDecoder", "Tokenizer"]


class Tokenizer:
    """A checkpoint's tokenizer. Made by `load`, `from_folder` or `from_gguf`; immutable, and safe to use from threads.

    Attributes:
      vocab_size: one more than the largest token id. A model's own vocabulary may be padded to more.
      bos_token_id: the id that begins a text, or `None`.
      eos_token_ids: every id that ends a text or a turn.
      special_token_ids: ids that `decode` leaves out.
      chat_templates: name -> template; the main one is "default".
      decode_plan: how tokens become text, for `IncrementalDecoder`.

    Example:
      >>> from tokenizers import Tokenizer as HfTokenizer, models
      >>> letters = HfTokenizer(models.BPE({"h": 0, "i": 1}, []))
      >>> Tokenizer(Vocabulary(letters, special_ids={}, eos_token_ids=()), "letters").encode("hi")
      [0, 1]
    """

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self.source = source
        self._hf = vocabulary.tokenizer
        self._special_ids = dict(vocabulary.special_ids)
        self.vocab_size: int = max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id: int | None = self._special_ids.get("bos_token")
        self.eos_token_ids: tuple[int, ...] = vocabulary.eos_token_ids
        self.chat_templates: dict[str, str] = dict(vocabulary.chat_templates)
        decoder = self._hf.decoder
        self.decode_plan = DecodePlan.from_state(decoder.__getstate__() if decoder else None, source)
        added = self._hf.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self._compiled: dict[str, ChatTemplate] = {}
        self._set_post_processor(vocabulary.add_bos, vocabulary.add_eos)

    def __getstate__(self) -> dict[str, Any]:
        """Templates are compiled anew where it is unpickled."""
        return {**self.__dict__, "_compiled": {}}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Loads the tokenizer of a checkpoint folder or of a .gguf file.

        Raises:
          ModelLoadError: there is none, or it cannot be read.
        """
        path = Path(path)
        if path.is_dir():
            return cls.from_folder(path)
        if path.is_file() and is_gguf(path):
            return cls.from_gguf(path)
        state = "is no GGUF file" if path.is_file() else "does not exist"
        raise ModelLoadError(f"{path} {state}, expected a checkpoint folder with tokenizer.json or a .gguf file")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Loads the tokenizer of a folder with tokenizer.json and, if there are, its companions.

        Raises:
          ModelLoadError: there is none, or it cannot be read.
        """
        return cls(folder_vocabulary(path), str(path))

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """Builds the tokenizer that a .gguf file describes.

        Raises:
          ModelLoadError: the file cannot be read, or its vocabulary is of an unknown kind.
        """
        return cls(gguf_vocabulary(GGUFFile(path).metadata, str(path)), str(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into token ids.

        Args:
          text: any text. Special tokens that are spelled out in it become their ids.
          add_special_tokens: put BOS before it and EOS after it, where the model wants them.

        Raises:
          RequestError: `text` is no string, or holds half of a surrogate pair.
        """
        return self._hf.encode(_check_text(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for many texts at once, on several threads.

        Raises:
          RequestError: as `encode`.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise RequestError(f"texts is {texts!r:.80}, expected a list of strings")
        batch = self._hf.encode_batch([_check_text(text) for text in texts], add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns token ids into text; bytes that are no UTF-8 become U+FFFD. Spaces are never "cleaned up".

        Raises:
          RequestError: an id is not in the vocabulary.
        """
        for token_id in token_ids:
            self.id_to_token(token_id)
        return self._hf.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """How the vocabulary spells a token.

        Raises:
          RequestError: the id is not in the vocabulary.
        """
        try:
            token = self._hf.id_to_token(token_id)
        except (TypeError, OverflowError):  # no integer, negative, or over 32 bits
            token = None
        if token is None:
            raise RequestError(
                f"token id {token_id!r:.40} is not in the vocabulary, expected ids in [0, {self.vocab_size})"
            )
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, spelled as in the vocabulary; `None` if there is none."""
        return self._hf.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Renders a chat into the text that the model was trained to continue.

        Args:
          messages: dicts with "role" and "content" (a string, or a list of text parts), and what else is used.
          add_generation_prompt: end with the opening of an answer.
          continue_final_message: end inside the final message, so that the model continues it.
          tools: JSON schemas of the functions that the model may call.
          chat_template: name of one of the model's templates, or the text of another one. `None`: "default", or
            "tool_use" if there are tools and the model has such a template.
          **variables: what else the template uses, such as `enable_thinking`.

        Raises:
          RequestError: the messages are malformed, or a variable is not one that the template uses.
          ChatTemplateError: the model has no template, or the template refused the messages or failed.
        """
        return self._template(chat_template, bool(tools)).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat. The template alone decides about BOS, so there is never a second one.

        Args:
          messages: as for `apply_chat_template`.
          **options: the options of `apply_chat_template`.

        Raises:
          RequestError: as `apply_chat_template`.
        """
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """ "bos_token" and the like -> text."""
        return {name: self.id_to_token(index) for name, index in self._special_ids.items()}

    def _template(self, wanted: str | None, with_tools: bool) -> ChatTemplate:
        if wanted is None:
            wanted = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
            if wanted not in self.chat_templates:
                raise ChatTemplateError(
                    f"{self.source} has no chat template{self._named()}: it may be a base model; give a plain prompt, "
                    "or a template by chat_template="
                )
        text = self.chat_templates.get(wanted, wanted)
        if wanted not in self._compiled:
            template = ChatTemplate(text, self.special_tokens)
            if wanted not in self.chat_templates:
                return template  # a caller's own: not kept, so that callers cannot fill the memory
            self._compiled[wanted] = template
        return self._compiled[wanted]

    def _named(self) -> str:
        return f' "default", only {", ".join(sorted(self.chat_templates))}' if self.chat_templates else ""

    def _set_post_processor(self, add_bos: bool | None, add_eos: bool | None) -> None:
        """Makes `add_special_tokens` do what the checkpoint's flags say; `None` leaves it as it is."""
        own = self._hf.encode("", add_special_tokens=True).ids
        wanted = []
        for name, flag, index in (("bos_token", add_bos, 0), ("eos_token", add_eos, -1)):
            token_id = self._special_ids.get(name)
            has = bool(own) and own[index] == token_id
            wanted.append((name, token_id, has if flag is None or token_id is None else flag, has))
        if all(want == has for _, _, want, has in wanted):
            return
        bos, eos = ([(self.id_to_token(token_id), token_id)] if want else [] for _, token_id, want, _ in wanted)
        single = [*(name for name, _ in bos), "$A", *(name for name, _ in eos)]
        self._hf.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=[*bos, *eos])


def _check_text(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"the text is {text!r:.80}, expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds half of a surrogate pair ({text[error.start]!r} at {error.start}), expected valid Unicode"
        ) from error
    return text

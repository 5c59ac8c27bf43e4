"""What a checkpoint says about its tokens, whatever kind of file it was read from."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer as HfTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer of the `tokenizers` library, and the facts that stand beside it in a checkpoint.

    Attributes:
      tokenizer: the tokenizer; special tokens are marked in it.
      special_ids: "bos_token", "eos_token", "unk_token", "pad_token" -> id, as far as the checkpoint states them.
      eos_token_ids: every id that ends a text or a turn.
      add_bos: whether BOS is put before a text; `None`: as the tokenizer's own post-processor does.
      add_eos: whether EOS is put after a text; `None`: as the tokenizer's own post-processor does.
      chat_templates: name -> template; the main one is "default".
    """

    tokenizer: HfTokenizer
    special_ids: dict[str, int]
    eos_token_ids: tuple[int, ...]
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)

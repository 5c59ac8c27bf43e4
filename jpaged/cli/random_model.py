"""A model of a known shape, random weights and a made-up vocabulary: what a load test needs without a checkpoint."""

import itertools
import string
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.model_configs import config_of
from jpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jpaged.engine import Engine

_NUM_BYTES: Final = 256
_SPACE: Final = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level vocabularies spell it
_END: Final = "<|end|>"
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def random_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a folder that has one; else a vocabulary of the bytes, made-up words, and the end of a text.

    With the latter, text becomes a token a byte. The words are for the other way: what the model samples is text of a
    usual length.

    Args:
      model: as for `config_of`.

    Raises:
      ConfigError: the model's vocabulary has no room for the bytes and the end.
      FetchError: there is no such model.

    Example:
      >>> tokenizer = random_tokenizer("smollm2-135m")
      >>> tokenizer.vocab_size, tokenizer.encode("é!"), tokenizer.decode([300, 40_000, tokenizer.eos_token_ids[0]])
      (49152, [127, 102, 0], ' bs bfuq')
    """
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    from jpaged.vocabulary import Vocabulary

    if (Path(model) / "tokenizer.json").exists():
        return Tokenizer.load(model)
    size = config_of(model).vocab_size
    num_words = size - _NUM_BYTES - 1
    if num_words < 0:
        raise ConfigError(f"the vocabulary of {model} has {size} tokens, expected at least {_NUM_BYTES + 1}")
    words = (
        _SPACE + "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *itertools.islice(words, num_words)]
    made = HfTokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.add_special_tokens([_END])
    end = {"eos_token": size - 1}
    vocabulary = Vocabulary(made, special_ids=end, eos_token_ids=(size - 1,), chat_templates={"default": _TEMPLATE})
    return Tokenizer(vocabulary, f"{model}, made up")


def make_random_engine(
    *, model: str, dtype: str | None, weights: str | None, config: EngineConfig, progress: bool | None
) -> "Engine":
    """The engine of such a model: the maker of an `EngineProcess`. Options as those of `LLM`; always the same weights.

    Raises:
      ConfigError: as `LLM`.
    """
    import jax
    from flax import nnx

    from jpaged.llm import LLM
    from jpaged.models import Llama

    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    made = Llama(config_of(model), rngs=nnx.Rngs(0), dtype=dtype)
    if weights is not None:
        from jpaged.models import quantise

        made = quantise(made, weights)
    return LLM(made, tokenizer=random_tokenizer(model), config=config, progress=progress).engine

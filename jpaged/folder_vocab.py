"""Reads the tokenizer of a Hugging Face checkpoint folder.

The files are tokenizer.json (the tokenizer itself), tokenizer_config.json and special_tokens_map.json (which tokens are
special), chat_template.jinja and additional_chat_templates/, generation_config.json and config.json (end-of-sequence
ids). All but the first may be missing.
"""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from jpaged.errors import ModelLoadError
from jpaged.vocabulary import Vocabulary

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def folder_vocabulary(folder: str | Path) -> Vocabulary:
    """Reads the tokenizer in a folder.

    Raises:
      ModelLoadError: there is no tokenizer.json, or a file is damaged or contradicts another.
    """
    folder = Path(folder)
    tokenizer = _read_tokenizer(folder)
    config = _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(tokenizer, config.get("added_tokens_decoder"), folder)
    names = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    special_ids = _mark_special(tokenizer, names, folder)
    return Vocabulary(
        tokenizer=tokenizer,
        special_ids=special_ids,
        eos_token_ids=_eos_token_ids(folder, special_ids),
        add_bos=_flag(config, "add_bos_token", folder),
        add_eos=_flag(config, "add_eos_token", folder),
        chat_templates=_chat_templates(folder, config),
    )


def _read_tokenizer(folder: Path) -> HfTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = "; there is a tokenizer.model, which Hugging Face transformers converts (use_fast=True, then save)"
        raise ModelLoadError(f"{folder} has no tokenizer.json, expected one beside the weights{hint}")
    try:
        tokenizer = HfTokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise ModelLoadError(f"{path} cannot be read: {error}; download it again") from error
    # A file may carry the settings of somebody's training: they would cut or fill up prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """ "bos_token" and the like -> text. A token is written as a string or as an object with its "content"."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_missing_tokens(tokenizer: HfTokenizer, added: Any, folder: Path) -> None:
    """Adds tokens that tokenizer_config.json lists and tokenizer.json lacks."""
    try:
        items = sorted((int(key), dict(value)) for key, value in dict(added or {}).items())
        contents = [str(spec["content"]) for _, spec in items]
    except (TypeError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{folder}: added_tokens_decoder in tokenizer_config.json is malformed ({error!r}), expected ids and "
            "objects with a content"
        ) from error
    for (index, spec), content in zip(items, contents, strict=True):
        if tokenizer.token_to_id(content) is None:
            flags = {name: bool(spec.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            tokenizer.add_tokens([AddedToken(content, special=bool(spec.get("special")), **flags)])
        if tokenizer.token_to_id(content) != index:
            raise ModelLoadError(
                f"{folder}: token {content!r} has id {index} in tokenizer_config.json and "
                f"{tokenizer.token_to_id(content)} in tokenizer.json, expected equal ids"
            )


def _mark_special(tokenizer: HfTokenizer, names: dict[str, str], folder: Path) -> dict[str, int]:
    """Sees to it that the named tokens are left out of decoded text. Returns their ids."""
    special_ids = {}
    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for name, text in names.items():
        index = tokenizer.token_to_id(text)
        if index is None:
            if name in ("bos_token", "eos_token"):
                raise ModelLoadError(f"{folder}: {name} {text!r} is not in the vocabulary of tokenizer.json")
            continue
        special_ids[name] = index
        if text not in marked:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return special_ids


def _eos_token_ids(folder: Path, special_ids: dict[str, int]) -> tuple[int, ...]:
    """The ids of generation_config.json (or else of config.json), and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(index, int) and index >= 0 for index in values):
            raise ModelLoadError(f"{folder / name}: eos_token_id is {value!r}, expected an id or a list of ids")
        if values:
            ids = values
            break
    own = [special_ids["eos_token"]] if "eos_token" in special_ids else []
    return tuple(dict.fromkeys([*ids, *own]))


def _flag(config: dict[str, Any], name: str, folder: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{folder}: {name} in tokenizer_config.json is {value!r}, expected true or false")
    return value


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if value is None and (folder / "chat_template.json").is_file():
        value = _read_json(folder / "chat_template.json").get("chat_template", 0)
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else [] if value is None else value
    try:
        templates = {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (TypeError, KeyError) as error:
        raise ModelLoadError(
            f"{folder}: chat_template is {value!r:.80}, expected a template or a list of objects with name and template"
        ) from error
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates

"""Golden values, made with Hugging Face transformers, and what the tests that read them share."""

from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent


def near(got: Any, want: Any, atol: float, what: str) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=what)


def whole(entry: dict[str, Any]) -> list[int]:
    """Prompt and output but the last token: the token at position i + 1 was chosen from the logits at i."""
    return entry["token_ids"] + entry["output_token_ids"][:-1]

"""What options make of an engine."""

import pytest

from jpaged.cli.options import EngineOptions, speculation_of
from jpaged.config import SpeculationConfig
from jpaged.errors import ConfigError


def test_guesses_are_off_unless_they_are_asked_for() -> None:
    assert EngineOptions().config().speculation is None
    assert EngineOptions(speculative_tokens=7).config().speculation == SpeculationConfig(num_tokens=7)


def test_less_than_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_tokens is -1, expected an integer of at least 0"):
        speculation_of(-1)

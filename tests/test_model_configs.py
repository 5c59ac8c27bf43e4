"""Shapes of models by name and from files."""

import json

import pytest

from jpaged.errors import FetchError
from jpaged.model_configs import config_of
from jpaged.model_shapes import model_shape
from tests.fakes import tiny_config


def test_by_name():
    assert config_of("Llama-3.1-8B") == model_shape("llama-3.1-8b")


def test_from_a_config_and_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_hf()))
    assert config_of(tmp_path) == config_of(f"{tmp_path}") == config_of(tmp_path / "config.json") == tiny_config()


def test_nothing_is_downloaded():
    with pytest.raises(FetchError, match=r"there is no model 'org/name'.*planning downloads nothing"):
        config_of("org/name")

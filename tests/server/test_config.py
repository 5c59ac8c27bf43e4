"""`ServerConfig`: what it refuses, and that it keeps secrets."""

import pytest

from jpaged.errors import ConfigError
from jpaged.server import ServerConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": ()}, "models is empty"),
        ({"models": "tiny"}, "models is 'tiny', expected a list"),
        ({"port": 65536}, r"port is 65536, expected an integer in \[0, 65535\]"),
        ({"port": True}, "port is True"),
        ({"host": ""}, "host is ''"),
        ({"api_keys": ["short"]}, "api_keys has a key that is not 8 to 512"),
        ({"admin_keys": ["with spaces in it"]}, "admin_keys has a key"),
        ({"max_requests_per_key": 1}, "there are no api_keys"),
        ({"max_body_bytes": 10}, "max_body_bytes is 10, expected an integer of at least 1024"),
        ({"drain_timeout_s": -1}, "drain_timeout_s is -1"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"log_prompts": "no"}, "log_prompts is 'no'"),
        ({"ssl_keyfile": __file__}, "both ssl_keyfile and ssl_certfile"),
        ({"ssl_ca_certs": __file__}, "without ssl_certfile"),
        ({"ssl_keyfile": __file__, "ssl_certfile": "/nowhere"}, "which is no file"),
        ({"ssl_cert_reqs": 7}, "ssl_cert_reqs is 7"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs is 2, expected ssl_ca_certs with it"),
    ],
)
def test_wrong_settings_are_named(settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**{"models": ("tiny",), **settings})


def test_secrets_are_not_shown() -> None:
    tls = {"ssl_keyfile": __file__, "ssl_certfile": __file__, "ssl_keyfile_password": "secret-3"}
    config = ServerConfig(models=["tiny"], api_keys=["secret-1"], admin_keys=["secret-2"], **tls)
    assert "secret" not in repr(config)
    assert config.scheme == "https"
    with pytest.raises(ConfigError) as caught:
        ServerConfig(models=["tiny"], api_keys=["secret key"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_who_can_reach_it(host, is_local) -> None:
    assert ServerConfig(models=["tiny"], host=host).is_local == is_local

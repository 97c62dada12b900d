"""Secrets in settings are found, and files that may hold them are private."""

import os
import stat
from typing import Any

import pytest

from lucidrl.utils.config import Config, dump_yaml, load_config, merged_settings
from lucidrl.utils.logger.folders import write_private_text
from lucidrl.utils.logger.redact import secret_like_keys


class _Settings(Config):
    name: str
    title: str
    default: int = 3
    kwargs: dict[str, Any]


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"env": {"kwargs": {"api_key": "abc"}}}, ["env.kwargs.api_key"]),
        ({"env": {"kwargs": {"token": 123}}}, ["env.kwargs.token"]),
        ({"credentials": {"user": "me", "ids": ["a"]}}, ["credentials.user", "credentials.ids.0"]),
        ({"url": "https://me:pass@host/x"}, ["url"]),
        ({"header": ["Bearer abc.def"]}, ["header.0"]),
        ({"command": "tool --api-key=abc"}, ["command"]),
        ({"token": "${oc.env:TOKEN,abc}"}, ["token"]),
        ({"token": "x${oc.env:TOKEN}"}, ["token"]),
    ],
)
def test_secrets_in_plain_text_are_found(settings, keys):
    assert secret_like_keys(settings) == keys


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "${oc.env:TOKEN}", "api_key": "${oc.env:KEY,null}", "password": "${other.key}"},
        {"url": "https://me:${oc.env:PASSWORD}@host/x", "header": "Bearer ${oc.env:TOKEN}"},
        {"token": None, "password": "", "auth": False},
        {"eos_token": "</s>", "max_tokens": 10, "sort_key": "x", "url": "https://host/x"},
    ],
)
def test_references_and_ordinary_values_are_not_secrets(settings):
    assert secret_like_keys(settings) == []


def test_the_value_of_a_secret_variable_is_found_under_any_key(monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "Zq7-not+for.anyone")
    assert secret_like_keys({"env": {"kwargs": {"x": "Zq7-not+for.anyone"}}}) == ["env.kwargs.x"]


def test_a_private_file_is_readable_by_its_owner_only_even_if_it_replaces_a_public_one(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    path.chmod(0o644)
    previous = os.umask(0)
    try:
        write_private_text(path, "token: ä\n")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text("utf-8") == "token: ä\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_dumped_config_keeps_references_and_loads_to_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "Zq7-not+for.anyone")
    settings = {
        "name": "x",
        "title": "${name}",
        "kwargs": {"token": "${oc.env:SERVICE_TOKEN}", "urls": ["a", "${oc.env:SERVICE_TOKEN}/b"]},
    }
    config = load_config(_Settings, settings)
    text = dump_yaml(config, merged_settings(settings, resolve=False))
    (tmp_path / "config.yaml").write_text(text)
    assert "Zq7" not in text
    assert config.kwargs["urls"] == ["a", "Zq7-not+for.anyone/b"]
    assert load_config(_Settings, tmp_path / "config.yaml") == config

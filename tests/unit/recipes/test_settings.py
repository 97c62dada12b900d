"""Settings are resolved once: presets count in full, references stay references, plain secrets are warned about."""

from __future__ import annotations

import os
import stat

import pytest

from lucidrl.errors import ConfigError
from lucidrl.recipes import run
from lucidrl.recipes.folder import create_run_folder, update_run_config
from lucidrl.recipes.settings import environment_references, new_settings, resumed_settings
from lucidrl.utils import nsys


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    return "env.kwargs.api_key=${oc.env:MY_TOKEN}"


@pytest.mark.parametrize("is_default", [True, False])
def test_the_profile_of_a_preset_counts(tmp_path, monkeypatch, is_default):
    (tmp_path / "recording.yaml").write_text("profile: {steps: '2:4', workers: driver}\n")
    monkeypatch.setattr("lucidrl.recipes.settings.PRESETS", tmp_path)
    monkeypatch.setattr("lucidrl.recipes.settings.default_preset", lambda algorithm, given: "recording")
    with run._ready(new_settings("grpo", preset=None if is_default else "recording")):
        request = nsys.profile_request()
        assert request is not None
        assert (str(request.steps), request.patterns) == ("2:4", ("driver",))


def test_a_reference_is_resolved_for_the_run_but_not_in_its_folder(tmp_path, token, monkeypatch):
    config = new_settings("grpo", overrides=[token, f"run.root={tmp_path}"])
    assert config.env.kwargs["api_key"] == "hunter2hunter2"
    folder = create_run_folder(config)
    written = (folder / "config.yaml").read_text()
    assert "${oc.env:MY_TOKEN}" in written
    assert "hunter2" not in written
    monkeypatch.setenv("MY_TOKEN", "changed")
    resumed = resumed_settings("grpo", folder, ["grpo.max_steps=7"])
    assert resumed.env.kwargs["api_key"] == "changed"
    update_run_config(folder, resumed)
    assert "${oc.env:MY_TOKEN}" in (folder / "config.yaml").read_text()
    assert resumed_settings("grpo", folder, []).max_steps == 7


def test_a_reference_given_at_a_resume_is_kept_too(tmp_path, token):
    folder = create_run_folder(new_settings("grpo", overrides=[f"run.root={tmp_path}"]))
    update_run_config(folder, resumed_settings("grpo", folder, [token]))
    assert "hunter2" not in (folder / "config.yaml").read_text()


def test_the_settings_are_for_their_owner_only(tmp_path):
    folder = create_run_folder(new_settings("grpo", overrides=[f"run.root={tmp_path}"]))
    path = folder / "config.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # as earlier versions made it
    update_run_config(folder, resumed_settings("grpo", folder, []))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"a": "${oc.env:X}", "b": 1}, {"a": "${oc.env:X}", "b": None}),
        ({"a": "x${oc.env:X}y", "b": {"c": "${a}"}}, {"a": "x${oc.env:X}y", "b": {"c": "${a}"}}),
        (
            {"s": {"t": "${oc.env:X}", "u": "${.t}", "v": "${..n}"}, "n": 2},
            {"s": {"t": "${oc.env:X}", "u": "${.t}", "v": None}, "n": None},
        ),
        (
            {"list": ["a", {"k": "${oc.env:X}"}], "whole": "${list}"},
            {"list": [None, {"k": "${oc.env:X}"}], "whole": "${list}"},
        ),
        ({"n": 3, "same": "${n}"}, None),
        ({"braces": "\\${x}"}, {"braces": "\\${x}"}),
        ({"plain": "text"}, None),
    ],
)
def test_what_depends_on_the_environment_is_kept_as_it_was_written(settings, kept):
    assert environment_references(settings) == kept


def test_a_text_with_braces_comes_back_from_the_folder_as_it_was(tmp_path):
    overrides = [r"env.kwargs.template='\${problem}'", f"run.root={tmp_path}"]
    config = new_settings("grpo", overrides=overrides)
    assert config.env.kwargs["template"] == "${problem}"
    folder = create_run_folder(config)
    assert resumed_settings("grpo", folder, []).env.kwargs == config.env.kwargs


def test_a_secret_in_plain_is_warned_about_and_its_value_is_not_repeated(token, caplog):
    new_settings("grpo", overrides=["env.kwargs.api_key=hunter2hunter2"])
    assert "env.kwargs.api_key looks like a secret" in caplog.text
    assert "hunter2" not in caplog.text
    caplog.clear()
    new_settings("grpo", overrides=[token, "policy.pad_token=x"])
    assert caplog.text == ""


def test_a_variable_that_is_not_set_is_named(tmp_path):
    assert "NOT_SET_ANYWHERE" not in os.environ
    with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
        new_settings("grpo", overrides=["env.kwargs.api_key=${oc.env:NOT_SET_ANYWHERE}"])


@pytest.mark.parametrize(("algorithm", "other"), [("grpo", "sft"), ("sft", "ppo"), ("ppo", "grpo")])
def test_a_resume_by_the_wrong_command_names_the_right_one(tmp_path, algorithm, other):
    folder = create_run_folder(new_settings(algorithm, overrides=[f"run.root={tmp_path}"]))
    with pytest.raises(ConfigError) as caught:
        resumed_settings(other, folder, [])
    assert str(caught.value) == (
        f"{folder} holds a run of {algorithm}, not of {other}; resume it with `lucidrl {algorithm} --resume {folder}`"
    )

"""No secret of a configuration reaches a tracker, and ordinary values are kept."""

import dataclasses
import json
import os
import string
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.utils.config import Config
from lucidrl.utils.logger.redact import is_secret_name, redacted

SECRET_NAMES = """
    token TOKEN hf_token hfToken HFToken hftoken HF_TOKEN hf-token X-Auth-Token wandb_token_2 github_tokens
    access_tokens
    api_key apiKey apikey API-KEY wandb_api_key OPENAI_API_KEY api_keys AWS_ACCESS_KEY_ID accesskey private_key_pem
    secret client_secret secrets password db.password dbPassword passwd passphrase auth basicAuth oauth2 Authorization
    credential credentials GOOGLE_APPLICATION_CREDENTIALS
    pwd dbPwd DB_PWD pw db_pw passcode wandb_key hf_key openai_key OPENAI_KEY account_key AccountKey encryption_key
    signing_key PAT GITHUB_PAT githubPat
""".split()  # noqa: SIM905
HARMLESS_NAMES = """
    pad_token eos_token bos_token unk_token mask_token stop_token cls_token image_token decoder_start_token eosToken
    stop_token_ids pad_token_id max_new_tokens train_mb_tokens tokenizer num_tokens token_mask tokens_per_s tokens
    token_ids token_level seconds_per_token author authors co-author keys key monkey primary_key key_size tokenization
    accessor private public PWD OLDPWD HOME learning_rate
    num_key_value_heads sort_key metric_key answer_key key_dim key_proj keyboard cache_key path pattern patch_size
    dispatch power pwm account service_name openai_model
""".split()  # noqa: SIM905

SECRET = "Zq7-not+for.anyone"


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret_is_recognised_however_it_is_written(name):
    assert redacted({"a": [{name: "x"}]}) == {"a": [{name: "<redacted>"}]}


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_names_that_only_look_alike_keep_their_values(name):
    assert redacted({name: "</s>"}) == {name: "</s>"}


@pytest.mark.parametrize("value", [None, "", True, False])
def test_one_still_sees_that_a_secret_is_unset(value):
    assert redacted({"token": value}) == {"token": value}


@pytest.mark.parametrize("value", ["x", 123456, 0.5, b"x", ["x"], {"sk-1": "owner"}, [None]])
def test_everything_below_the_name_of_a_secret_is_hidden(value):
    assert redacted({"credentials": value}) == {"credentials": "<redacted>"}


def test_arrays_under_the_name_of_a_secret_are_hidden_too():
    assert redacted({"secret": np.arange(3)}) == {"secret": "<redacted>"}


def test_values_of_secret_variables_are_found_inside_any_text(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.setenv("LONGER_TOKEN", SECRET + "-longer")
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("EOS_TOKEN", "</harmless>")
    assert redacted(
        {"url": f"https://x/?k={SECRET}&n=1", "list": [f"{SECRET}-longer"], f"key {SECRET}": "</harmless>"}
    ) == {
        "url": "https://x/?k=<redacted>&n=1",
        "list": ["<redacted>"],
        "key <redacted>": "</harmless>",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host/a?b=c", "https://<redacted>@host/a?b=c"),
        ("postgresql://user:p@ss:word@host:5432/db", "postgresql://<redacted>@host:5432/db"),
        ("see git+https://ghp_123@github.com/a/b and more", "see git+https://<redacted>@github.com/a/b and more"),
        ("http://host:8080/path@v1?mail=a@b", "http://host:8080/path@v1?mail=a@b"),
        ("someone@example.org", "someone@example.org"),
        ("wandb.api_key=abc lr=1e-4", "wandb.api_key=<redacted> lr=1e-4"),
        ("--hf-token='a b' --eos_token=</s>", "--hf-token=<redacted> --eos_token=</s>"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=<redacted>&b=2"),
    ],
)
def test_credentials_written_into_text_are_replaced_and_the_rest_stays(text, shown):
    assert redacted({"a": text}) == {"a": shown}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run --api-key abc --lr 1", "run --api-key <redacted> --lr 1"),
        ("run --token=abc --lr 1", "run --token=<redacted> --lr 1"),
        ("run --use-auth --lr 1", "run --use-auth --lr 1"),
        ("curl -H 'Authorization: Bearer ab.c' x", "curl -H 'Authorization: <redacted> <redacted>' x"),
        ("Bearer ab.c-d", "Bearer <redacted>"),
        ("Basic dXNlcjpwYXNz", "Basic <redacted>"),
        ("Basic arithmetic for beginners", "Basic arithmetic for beginners"),
        ('{"api_key": "a, b", "lr": 1}', '{"api_key": <redacted>, "lr": 1}'),
        ('{"api_key":"abc","eos_token":"</s>"}', '{"api_key":<redacted>,"eos_token":"</s>"}'),
        (r'{"password": "a\"b", "lr": 1}', '{"password": <redacted>, "lr": 1}'),
        ("{'api_key': None, 'token': ''}", "{'api_key': None, 'token': ''}"),
        ("Name=x;AccountKey=abc+/==;Suffix=y", "Name=x;AccountKey=<redacted>;Suffix=y"),
        ("password: abc", "password: <redacted>"),
        ("password='a token=b c' lr=1", "password=<redacted> lr=1"),
        ("Server(password=b'a b', api_key=abc)", "Server(password=<redacted>, api_key=<redacted>)"),
        ("Server(api_keys=['a', 'b'], lr=1)", "Server(api_keys=<redacted>"),
        ("Server(password='a b", "Server(password=<redacted>"),
        ("""command="export API_KEY='abc'; run" lr=1""", """command="export API_KEY=<redacted>; run" lr=1"""),
        ("mypackage.auth:make", "mypackage.auth:make"),
        ("max_tokens=5 key=reward sort_key: id", "max_tokens=5 key=reward sort_key: id"),
    ],
)
def test_values_that_a_text_gives_to_the_name_of_a_secret_are_replaced(text, shown):
    assert redacted({"a": text}) == {"a": shown}
    assert redacted({"a": shown}) == {"a": shown}  # each back end redacts again


@dataclasses.dataclass
class Server:
    host: str
    password: str


class Tracker(Config):
    api_key: str
    server: Server


def test_config_objects_are_opened():
    tracker = Tracker(api_key=SECRET, server=Server("h", SECRET))
    assert redacted({"tracker": tracker}) == {
        "tracker": {"api_key": "<redacted>", "server": {"host": "h", "password": "<redacted>"}}
    }


def test_the_copy_is_plain_and_the_original_untouched():
    inner = {"password": "x", "ids": (1, 2)}
    params = {"a": [inner], 3: {"token": "y"}, ("b", 1): {4}, "kind": Server}
    result = redacted(params)
    assert result == {
        "a": [{"password": "<redacted>", "ids": [1, 2]}],
        3: {"token": "<redacted>"},
        "('b', 1)": [4],
        "kind": str(Server),
    }
    assert params == {"a": [{"password": "x", "ids": (1, 2)}], 3: {"token": "y"}, ("b", 1): {4}, "kind": Server}
    result["a"][0]["ids"].append(3)
    assert inner["ids"] == (1, 2)


def test_a_name_that_is_no_text_may_name_a_secret():
    assert redacted({b"password": "x", ("db", "secret"): "x"}) == {
        "b'password'": "<redacted>",
        "('db', 'secret')": "<redacted>",
    }


class Login(NamedTuple):
    user: str
    password: str


class Client:
    """No container of any kind; what it is shows in its text only."""

    def __str__(self):
        return f"Client(api_key='{SECRET} and more', lr=1)"


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def test_the_fields_of_a_named_tuple_are_names():
    assert redacted({"login": Login("me", SECRET)}) == {"login": {"user": "me", "password": "<redacted>"}}


def test_other_objects_become_text_and_that_is_cleaned():
    assert redacted({"client": Client(), "range": range(3), "none": Unprintable(), Unprintable(): 1}) == {
        "client": "Client(api_key=<redacted>, lr=1)",
        "range": "range(0, 3)",
        "none": "<Unprintable>",
        "<Unprintable>": 1,
    }


@pytest.mark.parametrize("secret", [SECRET, "quo'te\"d \\ Zq7", "zürich-ключ", "ab//cd/./ef=="])
def test_values_of_secret_variables_are_found_in_values_that_are_no_text(monkeypatch, secret):
    monkeypatch.setenv("SOME_API_KEY", secret)
    hidden = redacted(
        {
            "path": Path("/data") / secret,
            "bytes": f"x{secret}".encode(),
            "set": {secret},
            "object": SimpleNamespace(name=secret),
            "json": json.dumps({"name": secret}),
            "array": np.array([f"x{secret}", 3], dtype=object),
            "words": np.array([secret]),
            ("a", secret): 1,
            Path(secret): 2,
        }
    )
    assert hidden == {
        "path": "/data/<redacted>",
        "bytes": "b'x<redacted>'" if '"' in secret or "'" not in secret else 'b"x<redacted>"',
        "set": ["<redacted>"],
        "object": "namespace(name='<redacted>')",
        "json": '{"name": "<redacted>"}',
        "array": ["x<redacted>", 3],
        "words": ["<redacted>"],
        "('a', '<redacted>')": 1,
        "<redacted>": 2,
    }


def test_arrays_of_numbers_stay_as_they_are():
    params = {"a": np.arange(3), "b": np.float32(1), "c": np.array(2), "d": torch.ones(2), "e": torch.tensor(1)}
    assert all(redacted(params)[name] is value for name, value in params.items())


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        (["password", "x"], ["password", "<redacted>"]),
        ([("password", "x"), ("lr", 1)], [["password", "<redacted>"], ["lr", 1]]),
        (["run.py", "--api-key", "x", "--lr", "1"], ["run.py", "--api-key", "<redacted>", "--lr", "1"]),
        (["run.py", "--use-auth", "--lr", "1"], ["run.py", "--use-auth", "--lr", "1"]),
        (["password", None], ["password", None]),
        (["password", "x", "y"], ["password", "x", "y"]),
        (["eos_token", "</s>"], ["eos_token", "</s>"]),
        (["What is a secret?", "Something hidden."], ["What is a secret?", "Something hidden."]),
        ([], []),
    ],
)
def test_an_item_may_be_named_by_the_one_before_it(items, shown):
    assert redacted({"a": items}) == {"a": shown}


def test_containers_that_contain_themselves_or_are_very_deep_end_somewhere():
    params = {"lr": 1}
    params["twice"] = [params, params]
    assert "<contains itself>" in repr(redacted(params))
    deep = "bottom"
    for _ in range(50_000):
        deep = [deep]
    assert "<too deep>" in repr(redacted({"deep": deep, "lr": 1}))


def test_long_text_takes_linear_time():
    start = time.process_time()
    pieces = ["a", "a.", "://", "a@", "=", " =", "a=b", "http://a:", "_token", '="', "A", "aB", "a ", "-", "--a "]
    pieces += ["Bearer ", "Basic ", "token=", "token = ", "token=)", "token=( ", "token: ", "token='", "token='\\"]
    for piece in pieces:
        redacted({"text": piece * 40_000})
    assert time.process_time() - start < 10


secrets = st.text(string.ascii_letters + string.digits + "/+-_.:@ é\n\\", min_size=8, max_size=40).filter(
    lambda text: len(text.strip()) >= 8 and text.strip() not in "<redacted>"
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))


@st.composite
def params_with(draw, hidden):
    """Any nesting of containers, with `hidden` under secret names, inside of text and as a key."""
    texts = st.tuples(st.text(max_size=5), st.text(max_size=5)).map(lambda around: hidden.join(around))
    leaves = plain | texts | texts.map(str.encode) | texts.map(lambda text: SimpleNamespace(text=text))
    under_secret_names = st.dictionaries(st.sampled_from(SECRET_NAMES), st.just(hidden) | st.lists(st.just(hidden)))
    values = st.recursive(
        leaves | under_secret_names,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just(hidden), inner, max_size=3)
        ),
        max_leaves=10,
    )
    return draw(st.dictionaries(st.text(max_size=5), values, max_size=4))


@given(st.data())
def test_a_secret_of_the_environment_survives_nowhere(data):
    secret = data.draw(secrets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {"MY_SERVICE_TOKEN": secret})
        shown = repr(redacted(data.draw(params_with(secret))))
    assert repr(secret.strip())[1:-1] not in shown


@given(
    st.dictionaries(st.sampled_from(SECRET_NAMES), st.just(SECRET) | st.just([{"a": SECRET}]) | st.just((SECRET, 1)))
)
def test_a_secret_under_a_secret_name_survives_nowhere(params):
    assert SECRET not in repr(redacted({"a": {"b": [params]}}))


@given(st.text())
def test_any_name_can_be_classified(name):
    assert isinstance(is_secret_name(name), bool)

"""Names on the hub: what is downloaded, and one sentence for everything that can go wrong."""

from __future__ import annotations

import socket

import pytest

from lucidrl.errors import ConfigError
from lucidrl.utils.hub import downloaded, is_hub_id, looks_like_an_id, parse_hub_id, pinned
from tests.hub import COMMIT, served_hub, use_hub

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit",
    "README.md": b"# Model",
    "consolidated.safetensors": b"the same weights",
    "onnx/config.json": b"{}",
}
DATA = {
    "data/train-0.parquet": b"1",
    "data/train-1.parquet": b"2",
    "data/test-0.parquet": b"3",
    "extra/rows.jsonl": b"{}",
    "load.py": b"raise SystemExit",
    "cache.pkl": b"pickle",
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with served_hub() as hub:
        hub.add("models/org/model", MODEL)
        hub.add("datasets/org/data", DATA)
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_without_code_and_pickles(hub):
    folder = downloaded("hub:org/model", "model")
    assert names_in(folder) == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    asked = " ".join(hub.requests)
    assert ".py" not in asked
    assert ".bin" not in asked


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hub:org/data", {name for name in DATA if name.endswith((".parquet", ".jsonl"))}),
        ("hub:org/data/data", {name for name in DATA if name.startswith("data/")}),
        ("hub:org/data@v1/data/train-*", {"data/train-0.parquet", "data/train-1.parquet"}),
        ("hub:org/data/data/test-0.parquet", {"data/test-0.parquet"}),
    ],
)
def test_a_dataset_is_downloaded_as_far_as_its_path_says(hub, name, found):
    assert names_in(downloaded(name, "dataset")) == found


def test_a_pinned_name_needs_the_hub_only_once(hub):
    name = pinned("hub:org/model@v1", "model")
    assert name == f"hub:org/model@{COMMIT}"
    hub.requests.clear()
    folder = downloaded(name, "model")
    assert folder.name == COMMIT
    assert hub.requests == []


def test_the_cache_is_used_offline_and_without_a_network(hub, monkeypatch, tmp_path):
    folder = downloaded("hub:org/model", "model")
    use_hub(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    hub.requests.clear()
    assert downloaded("hub:org/model", "model") == folder
    assert hub.requests == []
    use_hub(monkeypatch, _closed_url(), tmp_path / "cache")
    assert downloaded("hub:org/model", "model") == folder


def test_progress_is_shown_although_a_run_hides_the_bars_of_libraries(hub, capsys, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    monkeypatch.setenv("TQDM_POSITION", "-1")  # show bars although standard error is no terminal
    disable_progress_bars()
    try:
        downloaded("hub:org/model", "model")
        assert "Downloading bytes" in capsys.readouterr().err
        assert are_progress_bars_disabled("huggingface_hub.snapshot_download")
    finally:
        enable_progress_bars()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("hub:org/absent", "model", ["has no model org/absent", "private", "HF_TOKEN"]),
        ("hub:org/model", "dataset", ["has no dataset org/model"]),
        ("hub:org/closed", "model", ["hub:org/closed is gated", "/org/closed, and set HF_TOKEN"]),
        ("hub:org/closed", "dataset", ["hub:org/closed is gated", "/datasets/org/closed"]),
        ("hub:org/model@v9", "model", ["hub:org/model has no revision 'v9'", "branch, tag or commit"]),
        (f"hub:org/model@{'f' * 40}", "model", ["no revision 'fff"]),
        ("hub:org/pickled", "model", ["hub:org/pickled has no safetensors", "can run code"]),
        ("hub:org/model/onnx", "model", ["hub:org/model/onnx has no safetensors"]),
        ("hub:org/nothing", "model", ["no config.json"]),
        ("hub:org/data/absent", "dataset", ["hub:org/data/absent has no data files", "another path"]),
    ],
)
def test_every_refusal_is_one_sentence(hub, name, kind, said):
    hub.add("models/org/closed", MODEL)
    hub.add("datasets/org/closed", DATA)
    hub.gated |= {"models/org/closed", "datasets/org/closed"}
    hub.add("models/org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    hub.add("models/org/nothing", {"README.md": b""})
    with pytest.raises(ConfigError) as error:
        downloaded(name, kind)
    for part in said:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "hub:",
        "hub:model",
        "hub:/model",
        "hub:org/",
        "hub:org/a--b",
        "hub:org/a..b",
        "hub:org/model.git",
        "hub:org/model@",
        "hub:org/model@v1@v2",
        "hub:org/model/../other",
        "hub:org/model//etc/passwd",
        "hub:org name/model",
        f"hub:org/{'x' * 99}",
    ],
)
def test_a_malformed_name_is_refused_before_anything_is_asked(hub, name):
    with pytest.raises(ConfigError, match="is not a name on the hub; write hub:ORG/NAME"):
        downloaded(name, "model")
    assert hub.requests == []


def test_offline_and_not_cached_says_which_variable_forbids_it(hub, monkeypatch, tmp_path):
    use_hub(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    with pytest.raises(ConfigError, match=r"hub:org/model is not completely in the cache .*; unset HF_HUB_OFFLINE, or"):
        downloaded("hub:org/model", "model")
    assert hub.requests == []


def test_without_a_network_the_error_names_the_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    url = _closed_url()
    use_hub(monkeypatch, url, tmp_path / "cache")
    with pytest.raises(ConfigError, match=rf"and {url} cannot be reached; check the network, or give a folder on disk"):
        downloaded("hub:org/model", "model")


def test_a_hub_that_fails_is_named_with_its_answer(hub):
    hub.status = 503
    with pytest.raises(
        ConfigError, match=rf"{hub.url} answered with HTTP status 503; try again later, or give a folder"
    ):
        downloaded("hub:org/model", "model")


def test_names_and_their_parts():
    assert is_hub_id("hub:org/name")
    assert not is_hub_id("org/name")
    assert not is_hub_id(None)
    assert looks_like_an_id("org/name-1.5B")
    assert not looks_like_an_id("runs/grpo/exp_001")
    assert not looks_like_an_id("./name")
    name = parse_hub_id("hub:org/name@v1/data/*.parquet")
    assert (name.repository, name.revision, name.path) == ("org/name", "v1", "data/*.parquet")
    assert str(name) == "hub:org/name@v1/data/*.parquet"


def _closed_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"

"""Completions of a run or a model folder, with the tokens that training used."""

from __future__ import annotations

import shutil

import orjson
import pytest

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError, DataError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.loading import load_tokenizer
from lucidrl.recipes.generate import CHAT_HELP, Completer, Sampling, chat, complete_file, completions


def complete(folder, *prompts, **options):
    return list(completions(folder, prompts, Sampling(**{"max_new_tokens": 4, **options})))


def test_a_single_completion_is_greedy_and_several_are_sampled(embedded_folder):
    def sampled(samples, seed):
        return complete(embedded_folder, "2+3=", samples=samples, temperature=1.5, seed=seed)

    assert sampled(1, seed=0) == sampled(1, seed=1)
    assert sampled(8, seed=0) == sampled(8, seed=0)
    assert sampled(8, seed=0) != sampled(8, seed=1)


def test_prompts_of_different_lengths_are_completed_together_as_each_alone(embedded_folder, monkeypatch):
    prompts = ["2+3=", "12+30=", "1+1=", "40+2=", "7+7="]
    alone = [text for prompt in prompts for text in complete(embedded_folder, prompt)]
    assert complete(embedded_folder, *prompts) == alone
    monkeypatch.setattr("lucidrl.recipes.generate.PROMPTS_AT_ONCE", 2)
    assert complete(embedded_folder, *prompts) == alone


def test_the_samples_of_a_prompt_follow_one_another(embedded_folder):
    drawn = complete(embedded_folder, "2+3=", "40+2=", samples=3, temperature=0.01)
    assert drawn == [text for prompt in ("2+3=", "40+2=") for text in complete(embedded_folder, prompt) * 3]


def test_a_saved_tokenizer_reads_text_as_it_did_in_training(embedded_folder):
    text = "What is 1 + 1?\n  é"
    saved, original = load_tokenizer(str(embedded_folder)), embedded_tokenizer()
    assert saved.encode(text) == original.encode(text)
    assert saved.decode(original.encode("a b\n c")) == "a b\n c"


def test_a_prompt_longer_than_the_context_is_refused(embedded_folder):
    with pytest.raises(DataError, match="602 tokens"):
        complete(embedded_folder, "x" * 600)


def test_a_folder_of_anything_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"this folder has no config\.json; use .* a run folder"):
        complete(tmp_path, "1+1=")


def test_a_changed_bit_in_a_checkpoint_is_found_when_its_model_is_loaded_by_path(embedded_folder, tmp_path):
    with CheckpointManager(tmp_path).saving(1) as saved:
        shutil.copytree(embedded_folder, saved / "policy")
    policy = tmp_path / "step_1" / "policy"
    weights = policy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors: its content does not match its SHA-256"):
        complete(policy, "2+3=")


def test_a_file_of_lines_or_objects_is_completed_in_order(embedded_folder, tmp_path):
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("2+3=\n\n40+2=\n")
    rows = [{"prompt": "2+3=", "id": 1}, {"messages": [{"role": "user", "content": "40+2="}], "answer": "42"}]
    objects.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    expected = complete(embedded_folder, "2+3=", "40+2=")
    sampling = Sampling(max_new_tokens=4)
    assert list(complete_file(embedded_folder, lines, sampling, None)) == expected
    output = tmp_path / "completions.jsonl"
    assert list(complete_file(embedded_folder, objects, sampling, output)) == []
    written = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    assert written == [{**row, "completion": text} for row, text in zip(rows, expected, strict=True)]
    with pytest.raises(ConfigError, match="exists already; choose another file"):
        list(complete_file(embedded_folder, objects, sampling, output))


def test_a_file_of_prompts_has_any_format_of_a_dataset(embedded_folder, tmp_path):
    table, output = tmp_path / "prompts.csv", tmp_path / "completions.jsonl"
    table.write_text("prompt,level\n2+3=,1\n40+2=,2\n")
    assert list(complete_file(embedded_folder, table, Sampling(max_new_tokens=4), output)) == []
    written = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    expected = complete(embedded_folder, "2+3=", "40+2=")
    assert [(row["prompt"], row["level"], row["completion"]) for row in written] == [
        ("2+3=", "1", expected[0]),
        ("40+2=", "2", expected[1]),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "1"}\n{"prompt": 3}\n', r"a\.jsonl:2: column 'prompt' holds a int"),
        ("a.jsonl", b'{"prompt": "1"}\n{"text": "x"}\n', r"a\.jsonl:2: has the columns text; give either"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', r"a\.jsonl:1: column 'messages' holds the message"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "last message has the role assistant"),
        ("a.jsonl", b"\n", r"a\.jsonl has no rows"),
        ("a.csv", b"prompt,level\n2+3=\n", r"a\.csv, row 1: has 1 fields, but the header has 2"),
        ("a.jsonl", b"plain\n", r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: holds a list"),
        ("a.txt", b"\n \n", r"a\.txt has no prompts"),
        ("a.txt", b"\xff\xfe\n", "not valid UTF-8"),
        ("a.txt", None, r"a\.txt does not exist"),
    ],
)
def test_a_file_without_usable_prompts_is_refused_before_the_model_is_loaded(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        list(complete_file(tmp_path / "no model", tmp_path / name, Sampling(), None))


@pytest.fixture(scope="module")
def chat_model(embedded_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(embedded_folder, folder)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def chatted(folder, *messages):
    written = []
    chat(Completer(folder, Sampling(max_new_tokens=4)), messages, written.append)
    return written


def test_a_chat_remembers_until_it_is_reset(chat_model, monkeypatch):
    seen = []
    sampled_ids = Completer.sampled_ids

    def recorded(self, prompts):
        seen.append(self.tokenizer.decode(prompts[0]))
        return sampled_ids(self, prompts)

    monkeypatch.setattr(Completer, "sampled_ids", recorded)
    first, second, note, third = chatted(chat_model, "2+3=\n", "\n", "40+2=", "/reset", "2+3=", "/exit", "never")
    assert (third, note) == (first, "(new conversation)")
    assert second is not None
    assert len(seen) == 3
    assert seen[0] == seen[2] == "u:2+3=\na:"
    assert seen[1].startswith(f"u:2+3=\na:{first}")
    assert seen[1].endswith("u:40+2=\na:")


def test_a_chat_goes_on_after_a_message_that_is_too_long(chat_model):
    too_long, first = chatted(chat_model, "x" * 600, "2+3=")
    assert "tokens" in too_long
    assert too_long.endswith("/reset starts a new conversation)")
    assert [first] == chatted(chat_model, "2+3=")


def test_a_chat_explains_its_commands(chat_model):
    assert chatted(chat_model, "/help") == [f"(/help is unknown: {CHAT_HELP})"]

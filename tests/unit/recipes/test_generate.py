"""Completions of a run or a model folder, with the tokens that training used."""

from __future__ import annotations

import shutil

import pytest

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError, DataError
from lucidrl.models.embedded import embedded_model, embedded_tokenizer
from lucidrl.models.loading import load_tokenizer
from lucidrl.recipes.generate import Sampling, completions


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    embedded_model(warm=True, seed=0, attn_implementation="eager").save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def complete(folder, *prompts, **options):
    return list(completions(folder, prompts, Sampling(**{"max_new_tokens": 4, **options})))


def test_a_single_completion_is_greedy_and_several_are_sampled(model_folder):
    def sampled(samples, seed):
        return complete(model_folder, "2+3=", samples=samples, temperature=1.5, seed=seed)

    assert sampled(1, seed=0) == sampled(1, seed=1)
    assert sampled(8, seed=0) == sampled(8, seed=0)
    assert sampled(8, seed=0) != sampled(8, seed=1)


def test_prompts_of_different_lengths_are_completed_together_as_each_alone(model_folder, monkeypatch):
    prompts = ["2+3=", "12+30=", "1+1=", "40+2=", "7+7="]
    alone = [text for prompt in prompts for text in complete(model_folder, prompt)]
    assert complete(model_folder, *prompts) == alone
    monkeypatch.setattr("lucidrl.recipes.generate.PROMPTS_AT_ONCE", 2)
    assert complete(model_folder, *prompts) == alone


def test_the_samples_of_a_prompt_follow_one_another(model_folder):
    drawn = complete(model_folder, "2+3=", "40+2=", samples=3, temperature=0.01)
    assert drawn == [text for prompt in ("2+3=", "40+2=") for text in complete(model_folder, prompt) * 3]


def test_a_saved_tokenizer_reads_text_as_it_did_in_training(model_folder):
    text = "What is 1 + 1?\n  é"
    saved, original = load_tokenizer(str(model_folder)), embedded_tokenizer()
    assert saved.encode(text) == original.encode(text)
    assert saved.decode(original.encode("a b\n c")) == "a b\n c"


def test_a_prompt_longer_than_the_context_is_refused(model_folder):
    with pytest.raises(DataError, match="602 tokens"):
        complete(model_folder, "x" * 600)


def test_a_folder_of_anything_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a run folder nor a model folder"):
        complete(tmp_path, "1+1=")


def test_a_changed_bit_in_a_checkpoint_is_found_when_its_model_is_loaded_by_path(model_folder, tmp_path):
    with CheckpointManager(tmp_path).saving(1) as saved:
        shutil.copytree(model_folder, saved / "policy")
    policy = tmp_path / "step_1" / "policy"
    weights = policy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors: its content does not match its SHA-256"):
        complete(policy, "2+3=")

"""Asking a model: from a run or a model folder, with the tokens that training used."""

from __future__ import annotations

import pytest

from lucidrl.errors import ConfigError, DataError
from lucidrl.models.embedded import embedded_model, embedded_tokenizer
from lucidrl.models.loading import load_tokenizer
from lucidrl.recipes.ask import ask


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    embedded_model(warm=True, seed=0, attn_implementation="eager").save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def test_a_single_answer_is_the_likeliest_and_several_are_drawn(model_folder):
    def answers(samples, seed):
        return ask(model_folder, "2+3=", samples, temperature=1.5, max_new_tokens=4, seed=seed)

    assert answers(1, seed=0) == answers(1, seed=1)
    assert answers(8, seed=0) == answers(8, seed=0)
    assert answers(8, seed=0) != answers(8, seed=1)


def test_a_saved_tokenizer_reads_text_as_it_did_in_training(model_folder):
    text = "What is 1 + 1?\n  é"
    saved, original = load_tokenizer(str(model_folder)), embedded_tokenizer()
    assert saved.encode(text) == original.encode(text)
    assert saved.decode(original.encode("a b\n c")) == "a b\n c"


def test_a_prompt_longer_than_the_context_is_refused(model_folder):
    with pytest.raises(DataError, match="602 tokens"):
        ask(model_folder, "x" * 600, 1, temperature=1.0, max_new_tokens=4, seed=0)


def test_a_folder_of_anything_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a run folder nor a model folder"):
        ask(tmp_path, "1+1=", 1, temperature=1.0, max_new_tokens=4, seed=0)

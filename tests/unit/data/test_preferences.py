"""Preferences from rows: pairs of strings or messages, conversations with a common prompt, and labels."""

from __future__ import annotations

import pytest

from lucidrl.data.columns import Columns
from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Prompt, preferences_of
from lucidrl.errors import DataError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(row, **settings):
    return Columns(DataConfig(file="a.jsonl", **settings)).pair(row, "a.jsonl:3", "a.jsonl:3")


def labelled(row, **settings):
    return Columns(DataConfig(file="a.jsonl", **settings)).preference(row, "a.jsonl:3", "a.jsonl:3")


TEXTS = {"prompt": "2+2", "chosen": "4", "rejected": "5"}
CONVERSATIONS = {"chosen": [user("2+2"), assistant("4")], "rejected": [user("2+2"), assistant("5")]}


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (TEXTS, {}),
        ({**TEXTS, "prompt": [user("2+2")]}, {}),
        ({**TEXTS, "chosen": [assistant("4")], "rejected": [assistant("5")]}, {}),
        (CONVERSATIONS, {}),
        ({**CONVERSATIONS, "prompt": "2+2", "messages": [user("2+2"), assistant("4")]}, {}),
        ({"q": "2+2", "good": "4", "bad": "5"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ({"a": 2, "chosen": "4", "rejected": "5"}, {"template": "{{ a }}+2"}),
    ],
)
def test_every_layout_gives_the_same_pair(row, settings):
    found = pair(row, **settings)
    assert found.prompt == (user("2+2"),)
    assert found.chosen == (assistant("4"),)
    assert found.rejected == (assistant("5"),)
    assert found.key == pair(TEXTS).key


def test_the_prompt_of_conversations_is_their_common_beginning():
    history = [user("hi"), assistant("hello"), user("2+2")]
    found = pair(
        {"chosen": [*history, assistant("4")], "rejected": [*history, assistant("5"), user("?"), assistant("6")]}
    )
    assert found.prompt == tuple(history)
    assert found.rejected == (assistant("5"), user("?"), assistant("6"))
    assert pair(CONVERSATIONS, system_prompt="Be brief.").prompt[0] == {"role": "system", "content": "Be brief."}


def test_a_label_says_which_side_a_completion_is_on():
    row = {"prompt": "2+2", "completion": "4", "label": True}
    assert labelled(row).chosen == (assistant("4"),)
    assert labelled(row).rejected is None
    assert labelled({**row, "label": "False"}).rejected == (assistant("4"),)
    assert labelled(row).key == labelled(TEXTS).key == pair(TEXTS).key
    assert labelled({"p": "2+2", "c": "4", "good": False}, prompt="p", completion="c", label="good").chosen is None


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        (
            {"prompt": "2+2", "rejected": "5"},
            {},
            r"a.jsonl:3: has no column 'chosen' \(data.chosen\); it has prompt, rej",
        ),
        ({**TEXTS, "chosen": None}, {}, r"column 'chosen' holds nothing \(null\)"),
        ({**TEXTS, "rejected": "4"}, {}, "chosen and rejected are equal, so neither is better; remove the row"),
        ({"chosen": "4", "rejected": "5"}, {}, 'has the columns chosen, rejected; give "prompt", or name the column'),
        ({**CONVERSATIONS, "rejected": [user("3+3"), assistant("5")]}, {}, "begin with different messages"),
        ({**CONVERSATIONS, "rejected": [user("2+2")]}, {}, "rejected must begin with the assistant message"),
        ({**CONVERSATIONS, "rejected": [user("2+2"), assistant("4"), user("?")]}, {}, "chosen must begin with"),
        ({**CONVERSATIONS, "q": "2+2"}, {"prompt": "q"}, "data.prompt would have no effect"),
        ({**TEXTS, "prompt": [user("2"), assistant("3")]}, {}, "the prompt ends with an assistant message"),
    ],
)
def test_bad_pairs_are_refused_in_one_sentence(row, settings, said):
    with pytest.raises(DataError, match=said):
        pair(row, **settings)


def test_a_label_must_be_true_or_false():
    with pytest.raises(
        DataError, match=r"a.jsonl:3: column 'label' holds a str \('good'\); it must hold true or false"
    ):
        labelled({"prompt": "2+2", "completion": "4", "label": "good"})


def test_prompts_with_answers_become_pairs_with_the_answer_of_another_prompt():
    prompts = [Prompt(str(n), (user(str(n)),), {"answer": answer}) for n, answer in enumerate(["a", "a", "b"])]
    made = preferences_of(prompts)
    assert [(one.chosen[0]["content"], one.rejected[0]["content"]) for one in made.values()] == [
        ("a", "b"),
        ("a", "b"),
        ("b", "a"),
    ]
    with pytest.raises(DataError, match="all 2 prompts have the same answer"):
        preferences_of(prompts[:2])

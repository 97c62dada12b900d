import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.data.datasets import Prompt, PromptOrder, is_held_out, load_prompts, split
from lucidrl.errors import ConfigError, DataError


def write_lines(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def make_prompts(count):
    return [Prompt(f"p{index}", ({"role": "user", "content": str(index)},)) for index in range(count)]


def test_both_forms_of_line_are_read(tmp_path):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    path = write_lines(tmp_path, {"prompt": "1+1=", "answer": "2"}, "", {"id": 7, "messages": chat, "level": 3})
    first, second = load_prompts(path)
    assert first.prompt_id == "problems:1"
    assert first.messages == ({"role": "user", "content": "1+1="},)
    assert first.info == {"answer": "2"}
    assert (second.prompt_id, second.messages, second.info) == ("7", tuple(chat), {"level": 3})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "not valid JSON"),
        ([1, 2], "holds a list"),
        ({"question": "1+1"}, "has the keys question"),
        ({"prompt": "a", "messages": []}, 'either "prompt" or "messages"'),
        ({"prompt": 5}, "message .* is not valid"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "message .* is not valid"),
        ({"prompt": "a", "id": None}, "id None is not valid"),
        ({"prompt": "b", "id": "first"}, "line 1 has id 'first' too"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = write_lines(tmp_path, {"prompt": "a", "id": "first"}, line)
    with pytest.raises(DataError, match=rf"problems\.jsonl:2: .*{complaint}"):
        load_prompts(path)


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no prompts"):
        load_prompts(write_lines(tmp_path, "", ""))


def test_equal_prompts_of_a_file_are_on_one_side_of_the_split(tmp_path):
    path = write_lines(tmp_path, *({"prompt": f"{index % 20}+1="} for index in range(200)))
    train, validation = split(load_prompts(path), validation_fraction=0.3)
    assert not {p.messages[0]["content"] for p in train} & {p.messages[0]["content"] for p in validation}


def test_held_out_ids_never_change():
    assert [index for index in range(40) if is_held_out(f"p{index}", 0.1)] == [18, 19]


def test_the_held_out_share_is_the_fraction():
    held_out = sum(is_held_out(str(index), 0.2) for index in range(10_000))
    assert 1850 < held_out < 2150


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds(prompt_id, one, other):
    low, high = sorted((one, other))
    assert is_held_out(prompt_id, high) or not is_held_out(prompt_id, low)


def test_a_split_keeps_every_prompt_once_and_in_order():
    prompts = make_prompts(200)
    train, validation = split(prompts, 0.25)
    assert sorted([*train, *validation], key=prompts.index) == prompts
    assert train == sorted(train, key=prompts.index)


def test_prompts_with_one_split_key_stay_together():
    prompts = [Prompt(f"p{index}", (), split_key=f"k{index // 2}") for index in range(200)]
    train, validation = split(prompts, 0.5)
    assert not {p.split_key for p in train} & {p.split_key for p in validation}


def test_no_fraction_means_no_validation():
    prompts = make_prompts(3)
    assert split(prompts, 0.0) == (prompts, [])


def test_a_split_that_leaves_a_side_empty_is_refused():
    with pytest.raises(DataError, match="1 for training and 0 for validation"):
        split(make_prompts(1), 1e-9)
    with pytest.raises(ConfigError, match="below 1"):
        split(make_prompts(5), 1.0)


@given(num_prompts=st.integers(1, 30), seed=st.integers(), epoch=st.integers(0, 5))
def test_every_epoch_uses_every_prompt_once(num_prompts, seed, epoch):
    order = PromptOrder(num_prompts, seed)
    assert sorted(order.take(epoch * num_prompts, num_prompts)) == list(range(num_prompts))


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_order_depends_on_the_position_alone(start, count):
    uninterrupted = PromptOrder(13, seed=1).take(0, 120)
    assert PromptOrder(13, seed=1).take(start, count) == uninterrupted[start : start + count]


def test_epochs_and_seeds_give_different_orders():
    order = PromptOrder(50, seed=0)
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != PromptOrder(50, seed=1).take(0, 50)


def test_the_order_never_changes():
    assert PromptOrder(10, seed=0).take(0, 10) == [8, 4, 2, 6, 0, 7, 5, 1, 9, 3]


def test_an_order_of_no_prompts_is_refused():
    with pytest.raises(DataError, match="num_prompts=0"):
        PromptOrder(0, seed=0)
    with pytest.raises(ValueError, match="start=-1"):
        PromptOrder(3, seed=0).take(-1, 2)


def test_a_prompt_of_a_file_may_have_its_own_stop_strings(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "stop_strings": ["\\n", "."], "answer": 1}\n{"prompt": "b"}\n')
    first, second = load_prompts(path)
    assert (first.stop_strings, first.info, second.stop_strings) == (("\n", "."), {"answer": 1}, ())
    path.write_text('{"prompt": "a", "stop_strings": [""]}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: stop_strings"):
        load_prompts(path)

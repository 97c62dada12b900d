"""Datasets: rows are drawn once per epoch, split and filtered, and a resume continues exactly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Prompt, example_of, is_held_out
from lucidrl.data.items import Skip
from lucidrl.data.loading import (
    dataset_of_answers,
    dataset_of_prompts,
    example_dataset,
    load_prompts,
    prompt_dataset,
)
from lucidrl.errors import DataError


def length(item):
    return sum(len(message["content"]) for message in item.messages)


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


@pytest.fixture
def opened(write):
    def open_rows(rows, seed=0, **settings):
        return prompt_dataset(DataConfig(file=write(rows), **settings), seed=seed, length=length)

    return open_rows


def numbered(count, **columns):
    return [{"prompt": f"{n}+1=", "answer": n + 1, **columns} for n in range(count)]


def texts(prompts):
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_every_epoch_draws_every_training_row_once(opened):
    dataset = opened(numbered(100), validation_fraction=0.2)
    held_out = texts(dataset.held_out(100))
    assert 5 < len(held_out) < 40
    first, second = (texts(dataset.take(100 - len(held_out))) for _ in range(2))
    assert sorted([*first, *held_out]) == sorted([*second, *held_out]) == sorted(f"{n}+1=" for n in range(100))
    assert first != second
    assert dataset.skipped[Skip.HELD_OUT] >= len(held_out)


def test_the_order_depends_on_the_seed(opened):
    first, again, other = (texts(opened(numbered(50), seed=seed).take(20)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_restored_state_draws_exactly_what_follows(write):
    first, second = write(numbered(30), "a.jsonl"), write([{"prompt": f"b{n}"} for n in range(11)], "b.jsonl")
    config = DataConfig(file=[{"file": first, "weight": 3}, second], max_prompt_tokens=4)
    for taken in range(0, 60, 7):
        dataset = prompt_dataset(config, seed=5, length=length)
        dataset.take(taken)
        state = json.loads(json.dumps(dataset.state_dict()))
        expected = dataset.take(40)
        resumed = prompt_dataset(config, seed=5, length=length)
        resumed.load_state_dict(state)
        assert resumed.take(40) == expected


def test_a_mixture_draws_by_weight_and_keeps_ids_apart(write):
    files = [{"file": write(numbered(10), "a.jsonl"), "weight": 3}, write([{"prompt": "b", "id": 1}] * 5, "b.jsonl")]
    dataset = prompt_dataset(DataConfig(file=files, validation_fraction=0), seed=0)
    drawn = dataset.take(400)
    assert 260 < sum(text != "b" for text in texts(drawn)) < 340
    assert {prompt.prompt_id for prompt in drawn} == {f"1/a:{n}" for n in range(1, 11)} | {"2/1"}
    with pytest.raises(DataError, match=r"saved with 1 datasets, but data\.file has 2"):
        dataset.load_state_dict({"cursors": [3]})


def test_equal_messages_are_on_one_side_of_the_split(opened):
    dataset = opened([{"prompt": f"{n % 20}+1="} for n in range(200)], validation_fraction=0.3)
    held_out = set(texts(dataset.held_out(200)))
    assert held_out
    assert not held_out & set(texts(dataset.take(300)))


def test_a_validation_file_leaves_all_rows_for_training(opened, write):
    dataset = opened(numbered(10), validation_file=write([{"prompt": f"v{n}"} for n in range(5)], "v.jsonl"))
    assert sorted(texts(dataset.take(10))) == sorted(f"{n}+1=" for n in range(10))
    assert sorted(texts(dataset.held_out(9))) == [f"v{n}" for n in range(5)]
    assert len(dataset.held_out(2)) == 2
    survey = dataset.survey(length)
    assert (survey.num_train, survey.num_held_out) == (10, 5)


def test_filters_skip_rows_and_count_them_by_reason(opened):
    rows = [{"prompt": "x" * (n % 10), "level": n % 2} for n in range(1, 101)]
    dataset = opened(rows, where={"level": 1}, max_prompt_tokens=6, validation_fraction=0)
    drawn = dataset.take(30)
    assert {len(text) for text in texts(drawn)} == {1, 3, 5}
    dataset.take(30)
    assert dataset.skipped[Skip.WHERE] > 20
    assert dataset.skipped[Skip.LENGTH] > 5
    survey = dataset.survey(length)
    assert (survey.num_train, dict(survey.skipped)) == (30, {Skip.WHERE: 50, Skip.LENGTH: 20})


def test_a_single_usable_row_is_found_in_every_epoch(opened):
    dataset = opened(numbered(20), where={"answer": 7}, validation_fraction=0)
    assert texts(dataset.take(30)) == ["6+1="] * 30
    assert 29 * 20 < dataset.num_passed <= 30 * 20


def test_a_limit_takes_the_same_rows_for_every_seed(opened):
    subsets = [sorted(texts(opened(numbered(200), seed=seed, limit=20).take(20))) for seed in (0, 7)]
    assert subsets[0] == subsets[1]
    assert len(set(subsets[0])) == 20
    assert opened(numbered(200), limit=20).num_rows == 20
    more = opened(numbered(200), limit=50).take(50)
    assert set(subsets[0]) < set(texts(more))
    assert not set(texts(more)) & set(texts(opened(numbered(200), limit=50).held_out(200)))


@pytest.mark.parametrize(
    ("limit", "weights", "expected"),
    [
        (10, [1, 1, 1, 1], [3, 3, 2, 2]),
        (7, [1, 1], [4, 3]),
        (6, [3, 1, 1], [4, 1, 1]),
        (4, [100, 1, 1], [2, 1, 1]),
        (3, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_the_files_of_a_mixture_share_the_limit_exactly(write, limit, weights, expected):
    files = [
        {"file": write([{"prompt": f"{part}/{n}"} for n in range(50)], f"{part}.jsonl"), "weight": weight}
        for part, weight in enumerate(weights)
    ]
    dataset = prompt_dataset(DataConfig(file=files, limit=limit, validation_fraction=0.2), seed=0)
    drawn = set(texts(dataset.take(2000)))
    shares = [sum(text.startswith(f"{part}/") for text in drawn) for part in range(len(weights))]
    assert sorted(shares, reverse=True) == expected
    assert shares[0] == expected[0]
    assert dataset.num_rows == limit
    assert [len(dataset.held_out(count)) for count in (1, limit)] == [1, limit]


@pytest.mark.parametrize(
    "settings", [{"where": {"answer": -1}}, {"max_prompt_tokens": 1}, {"where": {"answer": -1}, "limit": 3}]
)
def test_filters_that_leave_nothing_are_named(opened, settings):
    with pytest.raises(DataError, match=r"data\.jsonl has no row to train on: all of its 20 rows"):
        opened(numbered(20), **settings).take(1)
    with pytest.raises(DataError, match=r"all 20 rows are dropped \(20 by data\."):
        opened(numbered(20), **settings).survey(length)


def test_a_split_that_leaves_a_side_empty_is_refused(opened):
    with pytest.raises(DataError, match=r"validation_fraction=1e-09 splits 3 rows into 3 for training and 0 for"):
        opened(numbered(3), validation_fraction=1e-9).survey(length)
    with pytest.raises(DataError, match="no row is left for validation"):
        opened(numbered(3), validation_fraction=1e-9).held_out(5)
    assert opened(numbered(3), validation_fraction=0).held_out(5) == []


def test_a_survey_of_many_rows_reads_evenly_spread_ones(opened):
    dataset = opened(numbered(1000), validation_fraction=0.2)
    everything, some = dataset.survey(length), dataset.survey(length, most_rows=100)
    assert (everything.num_checked, everything.is_complete, some.num_checked) == (1000, True, 100)
    assert everything.num_train + everything.num_held_out == 1000
    assert some.estimate(some.num_train) == f"about {some.num_train * 10:,}"
    assert everything.estimate(1000) == "1,000"
    assert (everything.longest, len(everything.lengths)) == (6, 1000)


def test_an_id_that_occurs_twice_is_refused(opened):
    dataset = opened([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], validation_fraction=0)
    with pytest.raises(DataError, match=r"data\.jsonl:2: has the id 'x' of .*data\.jsonl:1"):
        dataset.survey(length)


def test_rows_of_a_program_are_drawn_like_those_of_a_file():
    rows = [{"q": f"{n}"} for n in range(20)]
    config = DataConfig(prompt="q")
    dataset = prompt_dataset(config, seed=0, rows=rows, validation_rows=[{"q": "v"}])
    assert sorted(texts(dataset.take(20)), key=int) == [f"{n}" for n in range(20)]
    assert texts(dataset.held_out(5)) == ["v"]
    with pytest.raises(DataError, match="the Python rows of the dataset are empty"):
        prompt_dataset(config, seed=0, rows=[])
    with pytest.raises(DataError, match=r"rows\[0\]: has no column 'q'"):
        prompt_dataset(config, seed=0, rows=[{"p": "a"}]).take(1)


def test_held_out_keys_never_change():
    assert [index for index in range(40) if is_held_out(f"p{index}", 0.1)] == [18, 19]
    assert 1850 < sum(is_held_out(str(index), 0.2) for index in range(10_000)) < 2150
    assert all(is_held_out(str(n), 0.5) for n in range(200) if is_held_out(str(n), 0.2))


def test_all_prompts_of_a_file_in_memory(write):
    assert texts(load_prompts(write(numbered(3)))) == ["0+1=", "1+1=", "2+1="]


def test_a_prompt_is_completed_by_the_answer_of_its_info():
    prompt = Prompt("p", ({"role": "user", "content": "1+1="},), {"answer": 2})
    assert texts([example_of(prompt)]) == ["2"]
    with pytest.raises(DataError, match="'q' has no answer"):
        example_of(Prompt("q", prompt.messages))


def sorted_by_hash(count, seed, epoch=0):
    """The order of version 0.1.0."""
    return sorted(range(count), key=lambda n: hashlib.sha256(f"{seed}/{epoch}/{n}".encode()).digest())


def env_prompts(count):
    return [Prompt(f"p{n}", ({"role": "user", "content": str(n)},), {"answer": n}) for n in range(count)]


def test_a_run_of_version_0_1_0_continues_in_its_order(opened):
    dataset = opened(numbered(40), seed=3, validation_fraction=0.2)
    prompts = load_prompts_of(dataset)
    train = [prompt for prompt in prompts if not is_held_out(prompt.split_key, 0.2)]
    held_out = [prompt for prompt in prompts if is_held_out(prompt.split_key, 0.2)]
    order = [*sorted_by_hash(len(train), 3), *sorted_by_hash(len(train), 3, epoch=1)]
    dataset.load_state_dict({"position": 5, "batches": 1})
    assert dataset.take(len(train)) == [train[row] for row in order[5 : 5 + len(train)]]
    assert dataset.held_out(4) == [held_out[row] for row in sorted_by_hash(len(held_out), 0)[:4]]
    assert dataset.state_dict() == {"position": 5 + len(train)}


def load_prompts_of(dataset):
    return [item for _, item in dataset.spread(10**6)]


def test_a_supervised_run_of_version_0_1_0_continues_with_its_subset_order_and_split(write):
    prompts = env_prompts(30)
    train = [prompt for prompt in prompts if not is_held_out(prompt.prompt_id, 0.3)]
    subset = [train[row] for row in sorted_by_hash(len(train), 0)[:10]]
    dataset = dataset_of_answers(prompts, DataConfig(validation_fraction=0.3, limit=10), seed=2)
    dataset.load_state_dict({"position": 4})
    assert dataset.take(6) == [example_of(subset[row]) for row in sorted_by_hash(10, 2)[4:]]
    # A file of examples was split by the hash of its lines, and validated on the first held-out ones.
    path = write([{"prompt": str(n), "completion": "x"} for n in range(60)])
    examples = example_dataset(DataConfig(file=path, validation_fraction=0.2), seed=0)
    examples.load_state_dict({"position": 0})
    lines = Path(path).read_bytes().splitlines()
    held_out = [n for n, line in enumerate(lines) if is_held_out(hashlib.sha256(line).hexdigest(), 0.2)]
    assert [example.messages[0]["content"] for example in examples.held_out(5)] == [str(n) for n in held_out[:5]]


def test_prompts_in_memory_are_split_by_their_keys():
    prompts = [Prompt(f"p{n}", ({"role": "user", "content": str(n)},), split_key=f"k{n // 2}") for n in range(100)]
    dataset = dataset_of_prompts(prompts, DataConfig(validation_fraction=0.5), seed=0)
    held_out = {prompt.split_key for prompt in dataset.held_out(100)}
    assert held_out
    assert not held_out & {prompt.split_key for prompt in dataset.take(100)}

"""How generators share prompts, and what becomes of those that are lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from lucidrl.distributed.place import Place
from lucidrl.errors import ConfigError, DataError, LostWorkerError, WorkerError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.delivery import WeightDelivery
from lucidrl.models.generation.placement import generator_nodes
from lucidrl.models.generation.prompts import prompt_chunks
from lucidrl.models.generation.replicas import Replica, Replicas

PROMPTS = [b"a", b"b", b"a", b"c", b"d", b"d", b"e", b"f"]


class Group:
    """Stands for a process."""

    def __init__(self, number: int):
        self.number, self.has_ended = number, False
        self.end = threading.Event()

    def make_workers(self) -> None:
        pass

    def run_all(self, method: str, *args: Any) -> list[Any]:
        return [Place("node", "127.0.0.1", "device")]

    def kill(self) -> None:
        self.has_ended = True
        self.end.set()

    shutdown = kill


def lose(replica: Replica) -> None:
    raise LostWorkerError(f"generator {replica.number} is gone")


@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
def test_chunks_have_every_row_once_and_those_of_a_prompt_together(most):
    chunks = prompt_chunks(PROMPTS, most)
    assert 1 <= len(chunks) <= most
    assert sorted(row for rows in chunks for row in rows) == list(range(8))
    for prompt in set(PROMPTS):
        rows = {row for row, other in enumerate(PROMPTS) if other == prompt}
        assert any(rows <= set(chunk) for chunk in chunks)


def test_chunks_are_about_equal_and_one_is_the_rows_as_they_came():
    assert prompt_chunks([bytes([number]) for number in range(12)], 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert prompt_chunks(PROMPTS, 1) == [list(range(8))]
    assert prompt_chunks([], 4) == [[]]
    assert prompt_chunks([b"a"] * 6 + [b"b"], 4) == [[0, 1, 2, 3, 4, 5], [6]]


def test_losses_count_in_a_row_until_a_call_went_well():
    replicas = Replicas(2, Group, max_restarts=2)
    for _ in range(2):
        replicas.each(lose, replicas.all[:1])
        replicas.replace_lost()
    replicas.went_well()
    for _ in range(2):
        assert replicas.each(lose) == []  # both at once, as with their node, are one time
        replicas.replace_lost()
    assert replicas.num_replaced == 6
    replicas.each(lose, replicas.all[1:])
    with pytest.raises(WorkerError, match=r"again after 2 restarts .* no more: generator 1 is gone") as error:
        replicas.replace_lost()
    assert error.value.__cause__ is replicas.all[1].loss


def test_one_that_does_not_start_again_counts_too():
    started: list[int] = []

    def start(number: int) -> Group:
        started.append(number)
        if 1 < len(started) < 4:
            raise LostWorkerError("it died in the start")
        return Group(number)

    replicas = Replicas(1, start, max_restarts=3)
    replicas.each(lose)
    replicas.replace_lost()
    assert (replicas.num_replaced, len(started)) == (3, 4)


def test_no_room_for_a_replacement_is_told_with_what_it_was_for():
    groups = [Group(0)]

    def start(number: int) -> Group:
        if not groups:
            raise ConfigError("there is no room")
        return groups.pop()

    replicas = Replicas(1, start, max_restarts=3)
    replicas.each(lose)
    with pytest.raises(ConfigError, match="no room") as error:
        replicas.replace_lost()
    assert error.value.__notes__ == ["this was in place of generator 0, which was lost: generator 0 is gone"]


def test_all_end_if_one_cannot_start_or_raises():
    groups: dict[int, Group] = {}

    def start(number: int) -> Group:
        if number == 1:
            raise LostWorkerError("it died in the start")
        return groups.setdefault(number, Group(number))

    with pytest.raises(LostWorkerError, match="died in the start"):
        Replicas(3, start, max_restarts=3)
    assert [group.has_ended for group in groups.values()] == [True, True]

    def refuse(replica: Replica) -> None:
        if replica.number == 1:
            raise DataError("no such prompt")

    replicas = Replicas(2, Group, max_restarts=3)
    with pytest.raises(DataError):
        replicas.each(refuse)
    assert all(replica.group.has_ended for replica in replicas.all)
    replicas.replace_lost()
    assert replicas.num_replaced == 0


def test_what_is_watched_meanwhile_ends_the_work_if_it_fails():
    def fail() -> None:
        raise LostWorkerError("the policy is gone")

    replicas = Replicas(1, Group, max_restarts=3)
    with pytest.raises(LostWorkerError, match="the policy is gone"):
        replicas.each(lambda replica: replica.group.end.wait(10), watch=fail)
    assert replicas.all[0].group.has_ended
    assert replicas.all[0].loss is None


def test_memory_is_shared_with_a_device_of_the_policy_or_refused():
    replicas = Replicas(1, Group, max_restarts=3)

    def check(refit: str, device: str) -> None:
        policy = SimpleNamespace(group=None, places=[Place("node", "127.0.0.1", device)])
        WeightDelivery(policy, replicas, GenerationConfig(placement="separate", refit=refit), 1.0).check_devices()

    check("ipc", "device")
    check("auto", "GPU-1")
    with pytest.raises(ConfigError, match="generator 0 is on device and the policy on GPU-1; set refit=auto"):
        check("ipc", "GPU-1")


def test_an_error_is_raised_at_once_and_ends_what_others_are_busy_with():
    was_ended: list[bool] = []

    def work(replica: Replica) -> None:
        if replica.number == 1:
            raise DataError("no such prompt")
        was_ended.append(replica.group.end.wait(10))
        lose(replica)  # as a call of a process that was ended

    replicas = Replicas(2, Group, max_restarts=3)
    with pytest.raises(DataError):
        replicas.each(work)
    assert was_ended == [True]
    assert replicas.all[0].loss is None


def test_a_lost_node_is_told_of_once(caplog):
    together = threading.Barrier(3)

    def lose_with_node(replica: Replica) -> None:
        loss = LostWorkerError("node 10.0.0.2 is gone")
        loss.node = "10.0.0.2"
        together.wait(10)
        raise loss

    Replicas(3, Group, max_restarts=3).each(lose_with_node)
    assert caplog.text.count("node 10.0.0.2 is gone") == 1


def test_generators_that_share_memory_with_the_policy_are_on_its_nodes():
    assert generator_nodes(GenerationConfig(), ["a", "b", "a"]) is None
    for config in (GenerationConfig(refit="ipc"), GenerationConfig(placement="separate", nodes="policy")):
        choice = generator_nodes(config, ["a", "b", "a"])
        assert [choice.allows(node) for node in "abc"] == [True, True, False]
    choice = generator_nodes(GenerationConfig(placement="separate", nodes="other"), ["a", "b"])
    assert [choice.allows(node) for node in "abc"] == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": "other"}, "nodes=other is for generators beside the policy's workers, but placement=policy; set"),
        (
            {"placement": "separate", "nodes": "other", "refit": "ipc"},
            "refit=ipc shares memory within a node, but nodes=",
        ),
    ],
)
def test_settings_of_generators_that_cannot_hold_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GenerationConfig(**settings)

"""Weights reach generators over a separate group: complete, on one interface, or with an error at the timeout."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

from lucidrl.distributed import weight_group
from lucidrl.distributed.weight_buckets import TensorInfo, plan_buckets
from lucidrl.distributed.weight_group import WeightGroup
from lucidrl.errors import RefitError
from tests.tiers import slow_except

CPU = torch.device("cpu")
SHAPES = [
    ("embedding", (301, 7), torch.bfloat16),
    ("bias", (3,), torch.float32),
    ("large", (1000, 10), torch.float32),
    ("scalar", (), torch.float64),
    ("empty", (0, 4), torch.float32),
    ("mask", (13,), torch.bool),
    ("head", (301, 7), torch.float16),
]
INFOS = [TensorInfo(*shape) for shape in SHAPES]
BUCKET_BYTES = 6000


def weights_of(version: int, infos=INFOS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        info.name: (torch.randn(info.shape, generator=generator, dtype=torch.float64) * 3).to(info.dtype)
        for info in infos
    }


class Kept:
    """A sink that keeps a copy of what it is given."""

    def __init__(self) -> None:
        self.version = None
        self.weights = {}

    def begin(self, version: int) -> None:
        self.version, self.weights = version, {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.weights[name] = tensor.clone()

    def holds(self, version: int) -> bool:
        wanted = weights_of(version)
        return (
            self.version == version
            and list(self.weights) == list(wanted)
            and all(self.weights[name].equal(tensor) for name, tensor in wanted.items())
            and all(self.weights[name].dtype is tensor.dtype for name, tensor in wanted.items())
        )


def free_port(ip: str = "127.0.0.1") -> int:
    with socket.create_server((ip, 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def two_members(timeout_s: float = 20.0, receiver_timeout_s: float = 20.0):
    """A sender and a receiver in this process, each used by a separate thread."""
    port, groups = free_port(), {}

    def join() -> None:
        groups[1] = WeightGroup.join("127.0.0.1", port, 1, 2, CPU, receiver_timeout_s)

    thread = threading.Thread(target=join)
    thread.start()
    groups[0] = WeightGroup.join("127.0.0.1", port, 0, 2, CPU, timeout_s)
    thread.join()
    with groups[0], groups[1]:
        yield groups[0], groups[1]


def outcome_of(function, *args):
    """What it raises, and after how long, found in the background: call the result to wait for it."""
    outcome = []

    def run() -> None:
        start = time.monotonic()
        try:
            outcome.append(function(*args))
        except RefitError as error:
            outcome.append(str(error))
        outcome.append(time.monotonic() - start)

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join(30)
        assert not thread.is_alive()
        return tuple(outcome)

    return wait


def keep_sending(sender: WeightGroup) -> None:
    """More than fits on the way, so that the sender learns how the receiver fares."""
    for _ in range(2000):
        sender.send(weights_of(1).items(), INFOS, BUCKET_BYTES, 1, verify=False)


def receive_versions(port, versions):
    """On a rank: rank 0 sends, the others receive; every other version is verified."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with WeightGroup.join("127.0.0.1", port, rank, size, CPU, 20) as group:
        sink = Kept()
        for version in versions:
            if rank == 0:
                group.send(weights_of(version).items(), INFOS, BUCKET_BYTES + version, version, bool(version % 2))
            elif group.receive(INFOS, sink) != version or not sink.holds(version):
                return f"version {version} did not come whole"
    return "whole"


@pytest.mark.parametrize("ranks", slow_except(["two_ranks", "four_ranks"], "two_ranks"))
def test_every_version_comes_whole_over_one_group(ranks, request):
    ranks = request.getfixturevalue(ranks)
    sizes = [bucket.size_bytes for bucket in plan_buckets(INFOS, BUCKET_BYTES)]
    assert len(sizes) > 2
    assert sizes[-1] < BUCKET_BYTES < max(sizes)  # uneven, and one tensor larger than a bucket
    assert ranks(receive_versions, free_port(), [1, 2, 3, 70]) == ["whole"] * ranks.size


def test_float32_masters_are_rounded_to_what_was_announced():
    info = TensorInfo("weight", (5,), torch.bfloat16)
    master = torch.randn(5)
    with two_members() as (sender, receiver):
        sink = Kept()
        done = outcome_of(receiver.receive, [info], sink)
        sender.send([("weight", master)], [info], BUCKET_BYTES, 1, True)
        assert done()[0] == 1
        assert sink.weights["weight"].equal(master.bfloat16())


@pytest.mark.parametrize("poor", [0, 1])
def test_buckets_respect_the_member_with_the_least_memory(monkeypatch, poor):
    infos = [TensorInfo(name, (100,), torch.float32) for name in "abcd"]
    sent = []
    with two_members() as members:
        # The members differ by the device whose memory they query.
        for rank, group in enumerate(members):
            device = torch.device("cpu", rank)
            monkeypatch.setattr(group, "member", dataclasses.replace(group.member, device=device))
        free = {torch.device("cpu", 1 - poor): 1 << 30, torch.device("cpu", poor): 1900}
        monkeypatch.setattr(weight_group, "free_bytes", free.__getitem__)
        start = members[0]._start
        monkeypatch.setattr(members[0], "_start", lambda buffer: (sent.append(buffer.nbytes), start(buffer)))
        for version in (1, 2):
            sent.clear()
            done = outcome_of(members[1].receive, infos, Kept())
            members[0].send([(info.name, torch.zeros(100)) for info in infos], infos, 1 << 20, version, False)
            assert done()[0] == version
            assert sent[1:] == [896, 896]  # two weights each
            free[torch.device("cpu", poor)] -= 2 * 896  # which the group goes on to hold

        free[torch.device("cpu", poor)] = -1500
        done = outcome_of(members[1].receive, infos, Kept())
        with pytest.raises(RefitError, match=r"a takes 400 bytes, and a refit needs twice that .* bytes free"):
            members[0].send([], infos, 1 << 20, 3, False)
        done()


def refit_often(port, times):
    """On a rank: growth of its memory over the refits after the first few, in bytes, and of its descriptors."""
    rank = int(os.environ["RANK"])
    infos = [TensorInfo(f"weight {number}", (1 << 20,), torch.float32) for number in range(4)]
    weights = weights_of(0, infos)

    def used():
        process = psutil.Process()
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    with WeightGroup.join("127.0.0.1", port, rank, 2, CPU, 20) as group:
        for version in range(times + 5):
            if version == 5:
                before = used()
            if rank == 0:
                group.send(weights.items(), infos, 5 << 20, version, verify=False)
            else:
                group.receive(infos, Kept())
        return [after - first for first, after in zip(before, used(), strict=True)]


@pytest.mark.slow
def test_fifty_refits_leak_nothing(two_ranks):
    for grown_bytes, num_descriptors, num_threads in two_ranks(refit_often, free_port(), 50):
        assert grown_bytes < 100 << 20  # one refit is 16 MiB, so fifty of them 800
        assert num_descriptors == num_threads == 0


def listeners() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(at.laddr.ip, at.laddr.port) for at in connections if at.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_only_the_given_interface_is_listened_on_and_only_while_the_group_lives(ip):
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.create_server((ip, 0), family=family) as listener:
        port = listener.getsockname()[1]
    before, descriptors = listeners(), psutil.Process().num_fds()
    done = outcome_of(lambda: WeightGroup.join(ip, port, 1, 2, CPU, 20))
    sender = WeightGroup.join(ip, port, 0, 2, CPU, 20)
    receiver, _ = done()
    new = listeners() - before
    assert (ip, port) in new
    assert {address for address, _ in new} == {ip}
    for group in (sender, receiver, sender, receiver):
        group.close()
    del done
    assert listeners() == before
    assert psutil.Process().num_fds() <= descriptors


def test_a_wrong_port_is_an_error_at_the_timeout():
    start = time.monotonic()
    message = r"rank 1 did not reach policy rank 0 at 127.0.0.1:\d+ within 0.5 s: Connection ref"
    with pytest.raises(RefitError, match=message):
        WeightGroup.join("127.0.0.1", free_port(), 1, 2, CPU, 0.5)
    assert 0.3 < time.monotonic() - start < 30


def test_another_server_on_the_port_is_an_error_soon_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(RefitError, match=r"the server at .* is not policy rank 0"):
            WeightGroup.join("127.0.0.1", listener.getsockname()[1], 1, 2, CPU, 0.5)
        assert time.monotonic() - start < 20


def test_a_port_in_use_and_an_address_of_another_machine_are_refused_at_once():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RefitError, match=r"cannot listen on .*: Address already in use; ip must be"),
    ):
        WeightGroup.join("127.0.0.1", listener.getsockname()[1], 0, 2, CPU, 20)
    with pytest.raises(RefitError, match=r"cannot listen on 192.0.2.1:.*: Cannot assign requested address"):
        WeightGroup.join("192.0.2.1", free_port(), 0, 2, CPU, 20)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ip": "0.0.0.0"}, "ip=0.0.0.0 means every interface"),
        ({"ip": "::"}, "ip=:: means every interface"),
        ({"ip": "somewhere"}, "ip='somewhere' is not an IP address"),
        ({"port": 0}, "port=0 is not a TCP port"),
        ({"port": 65536}, "port=65536 is not a TCP port"),
        ({"rank": 2}, "rank=2 with world_size=2 is not valid"),
        ({"rank": -1}, "rank=-1 with world_size=2 is not valid"),
        ({"rank": 0, "world_size": 1}, "rank=0 with world_size=1 is not valid.*ranks from 1 for the generators"),
    ],
)
def test_what_can_be_no_group_is_refused_at_once(changed, message):
    arguments = {"ip": "127.0.0.1", "port": 29400, "rank": 1, "world_size": 2, **changed}
    with pytest.raises(RefitError, match=message):
        WeightGroup.join(**arguments, device=CPU, timeout_s=20)


def test_missing_members_are_an_error_at_the_timeout_for_all():
    port = free_port()
    member = outcome_of(WeightGroup.join, "127.0.0.1", port, 2, 3, CPU, 20)
    message = r"2 of 3 members \(rank 0, 2\) joined at 127.0.0.1:\d+ within 1 s; start the others"
    with pytest.raises(RefitError, match=message) as error:
        WeightGroup.join("127.0.0.1", port, 0, 3, CPU, 1)
    assert member()[0] == str(error.value)


@pytest.mark.parametrize(
    ("rank", "world_size", "device", "message"),
    [
        (1, 4, "cpu", "as rank 1 with world_size=4, but policy rank 0 has 3; pass the same"),
        (1, 3, "cuda", "as rank 1 with weights on cuda, but policy rank 0 has them on cpu"),
        (2, 3, "cpu", "as rank 2, but this rank has joined already; give every generator a different rank"),
    ],
)
def test_members_that_disagree_all_raise_at_once(rank, world_size, device, message):
    port = free_port()
    calls = [(0, 3, CPU), (2, 3, CPU), (rank, world_size, torch.device(device))]
    members = [outcome_of(WeightGroup.join, "127.0.0.1", port, *call, 60) for call in calls]
    for text, seconds in (member() for member in members):
        assert message in text
        assert seconds < 30


def test_a_member_too_many_is_turned_away():
    port = free_port()
    done = outcome_of(lambda: WeightGroup.join("127.0.0.1", port, 1, 2, CPU, 20))
    with WeightGroup.join("127.0.0.1", port, 0, 2, CPU, 20), done()[0]:
        for world_size in (2, 3):
            with pytest.raises(RefitError, match=r"joined at .* after all 2 members of the process group for weight"):
                WeightGroup.join("127.0.0.1", port, 1, world_size, CPU, 20)


def test_other_weights_than_announced_are_refused_by_both_sides():
    with two_members() as (sender, receiver):
        done = outcome_of(receiver.receive, INFOS[1:], Kept())
        with pytest.raises(RefitError, match="the refit failed on rank"):
            keep_sending(sender)
        assert "has other tensors than the 6 that this receiver expects" in done()[0]
        with pytest.raises(RefitError, match=r"weight transfer at 127.0.0.1:\d+ was closed.*join another one"):
            receiver.receive(INFOS, Kept())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "c"], "expected the weight b next, but got c"),
        (["a"], "expected the weight b next, but there are no more weights"),
        (["a", "b", "c"], "got the weight c after the last"),
    ],
)
def test_a_stream_that_is_not_what_was_announced_is_refused(names, message):
    infos = [TensorInfo(name, (2,), torch.float32) for name in "ab"]
    with two_members() as (sender, receiver):
        done = outcome_of(receiver.receive, infos, Kept())
        with pytest.raises(RefitError, match=message):
            sender.send([(name, torch.zeros(2)) for name in names], infos, BUCKET_BYTES, 1, False)
        done()


def test_a_damaged_bucket_is_refused_when_verifying(monkeypatch):
    with two_members() as (sender, receiver):
        start = sender._start

        def damage(buffer):
            if buffer.dtype is torch.uint8:
                buffer[5] ^= 1
            start(buffer)

        monkeypatch.setattr(sender, "_start", damage)
        done = outcome_of(receiver.receive, INFOS[:1], Kept())
        sender.send([("embedding", torch.zeros(301, 7))], INFOS[:1], BUCKET_BYTES, 3, True)
        assert "bucket of version 3 that starts with embedding does not match its SHA-256" in done()[0]


def test_an_error_of_the_sink_is_raised_as_it_is_and_the_sender_learns_of_it():
    class Full(Kept):
        def put(self, name, tensor):
            raise RefitError("no room")

    with two_members(timeout_s=60) as (sender, receiver):
        done = outcome_of(receiver.receive, INFOS, Full())
        start = time.monotonic()
        with pytest.raises(RefitError, match="the refit failed on rank"):
            keep_sending(sender)
        assert time.monotonic() - start < 20
        assert done()[0] == "no room"


def test_a_silent_sender_is_an_error_at_the_timeout():
    with two_members(receiver_timeout_s=0.5) as (_, receiver):
        start = time.monotonic()
        with pytest.raises(RefitError, match=r"[Tt]imed out.*took longer than 0.5 s"):
            receiver.receive(INFOS, Kept())
        assert 0.4 < time.monotonic() - start < 30
        start = time.monotonic()
        receiver.close()
        receiver.close()
        assert time.monotonic() - start < 20


def send_part_of_it(port, after_tensors):
    """A sender that is killed in the middle of its second refit."""

    def weights():
        for number, item in enumerate(weights_of(2).items()):
            if number == after_tensors:
                time.sleep(0.3)  # what is on its way arrives
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    torch.set_num_threads(1)
    group = WeightGroup.join("127.0.0.1", port, 0, 2, CPU, 90)
    group.send(weights_of(1).items(), INFOS, BUCKET_BYTES, 1, True)
    group.send(weights(), INFOS, BUCKET_BYTES, 2, True)


@pytest.mark.parametrize("after_tensors", slow_except([0, 3], 3))
def test_a_receiver_learns_at_once_that_its_sender_was_killed(after_tensors):
    port, sink = free_port(), Kept()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=send_part_of_it, args=(port, after_tensors), daemon=True)
    process.start()
    with WeightGroup.join("127.0.0.1", port, 1, 2, CPU, 90) as receiver:
        assert receiver.receive(INFOS, sink) == 1
        assert sink.holds(1)
        done = outcome_of(receiver.receive, INFOS, sink)
        process.join(60)
        died = time.monotonic()
        assert "a member exited" in done()[0]
        assert time.monotonic() - died < 30
    assert time.monotonic() - died < 45  # leaving does not wait for the others
    assert process.exitcode == -signal.SIGKILL

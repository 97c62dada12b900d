"""A refit of a generator in another process, compared with a plain copy of the same bytes.

Over shared memory, the policy copies the weights once, and the generator computes with that copy. The benchmark
compares this with one plain copy of the same bytes within a process. Over the network (here the loopback interface),
the weights are packed, sent and unpacked. The benchmark prints this next to a plain copy through one socket and makes
no claim.
"""

from __future__ import annotations

import itertools
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from harness import Claim, arguments, report, take_turns

from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy

WARMUPS = 3
"""Untimed rounds, which touch new memory."""


@contextmanager
def policy_and_generator(model: str, refit: str) -> Iterator[tuple[SeparateGenerator, int]]:
    """A generator in another process than its policy, and the size of the weights in bytes."""
    config = PolicyConfig(model_name=model, precision="bfloat16", generation={"placement": "separate", "refit": refit})
    tokenizer = load_tokenizer(model)
    with (
        Policy(config, tokenizer, init_optimizer=False, init_reference_model=False) as policy,
        SeparateGenerator(policy, config, tokenizer) as generator,
    ):
        yield generator, sum(size for _, size in policy.group.run_all("prepare_weights_for_ipc")[0][0])


def shared_memory_claims(model: str, rounds: int) -> list[Claim]:
    versions = itertools.count(1)
    with policy_and_generator(model, "ipc") as (generator, size_bytes):
        source = torch.ones(size_bytes // 2, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        times = take_turns(
            {
                "plain copy": lambda: target.copy_(source),
                "refit": lambda: generator.update_weights(next(versions)),
            },
            rounds,
            WARMUPS,
        )
    print(
        f"{size_bytes / 2**20:.0f} MiB: refit {1e3 * times.median('refit'):.1f} ms, "
        f"plain copy {1e3 * times.median('plain copy'):.1f} ms"
    )
    return [
        Claim("refit over shared memory vs one plain copy of the weights", 0.4, times.speedup("refit", "plain copy"))
    ]


@contextmanager
def socket_to_process(size_bytes: int) -> Iterator[socket.socket]:
    """A socket whose other end reads `size_bytes` again and again, and replies with one byte each time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=read_repeatedly, args=(listener.getsockname(), size_bytes), daemon=True
        )
        process.start()
        connection, _ = listener.accept()
        with connection:
            yield connection
        process.join()


def read_repeatedly(address: tuple[str, int], size_bytes: int) -> None:
    memory = memoryview(bytearray(size_bytes))
    with socket.create_connection(address) as connection:
        while connection.recv_into(memory, flags=socket.MSG_WAITALL):
            connection.sendall(b".")


def compare_collective(model: str, rounds: int) -> None:
    versions = itertools.count(1)
    with (
        policy_and_generator(model, "collective") as (generator, size_bytes),
        socket_to_process(size_bytes) as connection,
    ):
        memory = memoryview(bytearray(size_bytes))

        def copy_through_socket() -> None:
            connection.sendall(memory)
            connection.recv(1)

        times = take_turns(
            {"socket": copy_through_socket, "refit": lambda: generator.update_weights(next(versions))}, rounds, WARMUPS
        )
    print(
        f"{size_bytes / 2**20:.0f} MiB: refit over the network {1e3 * times.median('refit'):.1f} ms, plain copy "
        f"through a socket {1e3 * times.median('socket'):.1f} ms"
        f"; refit vs socket: {times.speedup('refit', 'socket'):.2f} x"
    )


def main() -> None:
    options = arguments(
        __doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"), rounds=(int, 21, "timed refits per kind")
    )
    torch.set_num_threads(options.threads)
    compare_collective(options.model, options.rounds)
    report(shared_memory_claims(options.model, options.rounds), options.json)


if __name__ == "__main__":
    main()

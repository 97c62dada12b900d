"""Extension of vLLM's workers: receives refits and applies the temperature.

vLLM has one worker per tensor parallel rank. With one rank, the worker is in the process of the replica; with several,
each is a separate process.
"""

from __future__ import annotations

import gc
import glob
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lucidrl.distributed.workers.process import end_with_driver, leave_signals_to_driver
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.generation.receiver import EngineReceiver
from lucidrl.models.generation.refit_rank import RefitRank
from lucidrl.models.loading import DTYPES, empty_model
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id


@dataclass(frozen=True)
class RankResult:
    """Result of a call of one rank. vLLM would lose the results of the other ranks if a call raised an error."""

    value: Any = None
    problem: str = ""
    """Message of the error, if any."""
    is_refit_error: bool = False


class VllmRank:
    """A base class that vLLM adds to its worker class (`worker_extension_cls`); vLLM calls its methods by name."""

    if TYPE_CHECKING:  # attributes of vLLM's worker
        rank: int
        device: torch.device
        distributed_init_method: str

        def get_model(self) -> torch.nn.Module: ...

        def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    refit_rank: RefitRank

    def prepare_rank(self, config: PolicyConfig, replica_pid: int, dies_with_starting_thread: bool) -> None:
        """Prepare this rank to generate at the configured temperature and to receive weights."""
        if os.getpid() != replica_pid:
            leave_signals_to_driver()
            end_with_driver(dies_with_starting_thread)
            _unlink_shared_memory(self.distributed_init_method)
            unlink_rings()
        if config.generation.temperature != 1.0:
            _divide_logits(config.generation.temperature, self.get_model())
        model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
        # On a CPU, the policy offers weights to all processes of a node under local rank 0.
        name = device_id(self.device, 0)
        receiver = EngineReceiver(model, self.device, name, self.load_rank)
        self.refit_rank = RefitRank(receiver, self.device, name, self.rank)

    def call_rank(self, method: str, args: tuple[Any, ...]) -> RankResult:
        """Call a method of `refit_rank`; return an error instead of raising it."""
        try:
            return RankResult(getattr(self.refit_rank, method)(*args))
        except RefitError as error:
            return RankResult(problem=str(error), is_refit_error=True)
        except Exception as error:  # vLLM's loaders raise errors of many types
            traceback.print_exc()
            return RankResult(problem=f"{type(error).__name__}: {error}")

    def load_rank(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into vLLM's layout; names are those of the Hugging Face model.

        Raises:
            Exception: of vLLM; the rank then holds a mixture of weights and must not be used any more.
        """
        self.reload_weights(weights_iterator=iter(weights))


def unlink_rings() -> None:
    """Unlink the shared memory of the message queues that vLLM created in this process; see `_unlink_shared_memory`.

    Call this after the start of vLLM, when the other processes of the replica have opened the queues.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
    from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

    # vLLM keeps no list of its queues, and hides them from the garbage collector (`gc.freeze`).
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = [part for part in gc.get_objects() if type(part) in (ShmRingBuffer, ShmTensorArena) and part.is_creator]
    if is_frozen:
        gc.freeze()
    for part in found:
        part.is_creator = False  # or vLLM unlinks it again when it shuts down
        part.shared_memory.unlink()


def _unlink_shared_memory(init_method: str) -> None:
    """Unlink the shared memory of vLLM's ranks, which all have opened it, so that it ends with them even after a kill.

    vLLM names it after the last part of the address at which the ranks met.
    """
    for path in Path("/dev/shm").glob(f"{glob.escape(re.split('[/:]', init_method)[-1])}-*"):
        path.unlink(missing_ok=True)


def _divide_logits(temperature: float, model: torch.nn.Module) -> None:
    """Make a model of vLLM divide its logits by the temperature, in float32."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def divide(_module: Any, _inputs: Any, logits: torch.Tensor | None) -> torch.Tensor | None:
        return None if logits is None else logits.float() / temperature  # only rank 0 has logits

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise ConfigError(
            f"policy.generation.temperature={temperature} cannot be applied to {type(model).__name__} in vLLM; set it "
            "to 1, or set policy.generation.engine=builtin"
        )
    for module in found:
        module.register_forward_hook(divide)

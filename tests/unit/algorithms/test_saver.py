"""A checkpoint is reported as saved when it is committed, and never before; the loop does not wait for the disk."""

from __future__ import annotations

import threading

import pytest

from lucidrl.algorithms.saver import Saver, checkpoint_size_bytes
from lucidrl.checkpoint import writer
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.tensors import TensorFile
from lucidrl.data.messages import collate, supervised_example
from lucidrl.errors import CheckpointError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.loading import model_facts
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from tests.tiers import slow_except


def one_example():
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    return collate([supervised_example(embedded_tokenizer(), messages)], pad_id=0, supervised=True)


class HeldBack:
    """A saver of a real policy, whose writing waits until it is allowed."""

    def __init__(self, root, monkeypatch, background=True):
        self.root = root
        self.allowed = threading.Event()
        self.error = None
        self.messages: list[str] = []
        self.policy = Policy(PolicyConfig(), embedded_tokenizer(), init_reference_model=False)
        config = CheckpointConfig(every=1, background=background)
        self.saver = Saver(CheckpointManager(root), config, self.policy, self.messages.append)
        write = TensorFile.write

        def wait_and_write(file, path):
            assert self.allowed.wait(60)
            if self.error is not None:
                raise self.error
            return write(file, path)

        monkeypatch.setattr(TensorFile, "write", wait_and_write)

    def save(self, step):
        self.saver.save(step, {"step": step}, {})

    def folders(self):
        return sorted(path.name for path in self.root.iterdir() if path.name.startswith("step_"))

    def wait_until_written(self):
        for _ in range(1000):
            if self.policy.is_save_written():
                return
            threading.Event().wait(0.01)
        raise TimeoutError


@pytest.fixture
def held(tmp_path, monkeypatch):
    return HeldBack(tmp_path, monkeypatch)


def test_a_checkpoint_is_saved_when_it_is_settled_and_not_before(held):
    held.save(1)
    held.saver.settle()
    assert (held.folders(), held.messages) == ([], [])
    held.allowed.set()
    held.wait_until_written()
    assert (held.folders(), held.messages) == ([], []), "written is not committed"
    held.saver.settle()
    assert (held.folders(), held.messages) == (["step_1"], ["saved step 1"])
    held.saver.settle()
    held.saver.finish()
    assert held.messages == ["saved step 1"]
    assert held.saver.manager.load(1).state == {"step": 1}


def test_the_next_save_commits_the_one_before(held):
    held.save(1)
    held.allowed.set()
    held.save(2)
    assert held.messages == ["saved step 1"]
    held.saver.finish()
    assert held.folders() == ["step_1", "step_2"]


def test_the_first_save_uses_memory_that_was_allocated_after_the_first_step(tmp_path, monkeypatch):
    reused = []

    class Recorded(TensorFile):
        def __init__(self, specs, memory=None, *, pin_memory=False):
            super().__init__(specs, memory, pin_memory=pin_memory)
            reused.append(self.memory is memory)

    monkeypatch.setattr(writer, "TensorFile", Recorded)
    policy = Policy(PolicyConfig(), embedded_tokenizer(), init_reference_model=False)
    policy.train(one_example(), NLLLoss())
    saver = Saver(CheckpointManager(tmp_path), CheckpointConfig(every=3), policy, lambda line: None)
    for step in (1, 2, 3):
        saver.end_step(step, dict, {}, last_step=3, is_stopped=False)
    # The recorder sees the reserved files first: their memory is new. Then weights and optimizer are saved.
    assert reused == [False, False, True, True]


def test_a_run_without_a_later_save_reserves_nothing(tmp_path, monkeypatch):
    policy = Policy(PolicyConfig(), embedded_tokenizer(), init_reference_model=False)
    monkeypatch.setattr(policy, "reserve_save", lambda *args, **kwargs: pytest.fail("no save is due"))
    config = CheckpointConfig(every=4, final=False)
    saver = Saver(CheckpointManager(tmp_path), config, policy, lambda line: None)
    for step in (1, 2, 3):
        saver.end_step(step, dict, {}, last_step=3, is_stopped=False)


def test_memory_is_reserved_after_the_first_update(tmp_path):
    policy = Policy(PolicyConfig(), embedded_tokenizer(), init_reference_model=False)
    assert not policy.reserve_save(tmp_path)  # the size of the optimizer's state is not known
    assert policy.reserve_save(tmp_path, weights_only=True)
    policy.train(one_example(), NLLLoss())
    assert policy.reserve_save(tmp_path)


def test_without_background_a_save_is_committed_at_once(tmp_path, monkeypatch):
    held = HeldBack(tmp_path, monkeypatch, background=False)
    held.allowed.set()
    held.save(1)
    assert held.messages == ["saved step 1"]


def test_a_save_that_fails_is_an_error_and_leaves_the_checkpoint_before(held):
    held.allowed.set()
    held.save(1)
    held.saver.finish()
    held.error = OSError(28, "No space left on device")
    held.save(2)
    held.wait_until_written()
    with pytest.raises(CheckpointError, match=r"no space left to save .* \d+ bytes are needed in all, \d+ bytes are"):
        held.saver.settle()
    assert [path.name for path in held.root.iterdir()] == ["step_1"]
    assert held.messages == ["saved step 1"]
    held.error = None
    held.save(3)
    held.saver.finish()
    assert held.folders() == ["step_1", "step_3"]


def test_a_save_that_cannot_begin_leaves_nothing(held, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 7}))
    with pytest.raises(CheckpointError, match="7 bytes are available"):
        held.save(1)
    assert list(held.root.iterdir()) == []
    held.saver.finish()


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(tmp_path, precision, weights_only):
    config = PolicyConfig(precision=precision)
    policy = Policy(config, embedded_tokenizer(), init_reference_model=False)
    policy.train(one_example(), NLLLoss())
    settings = CheckpointConfig(weights_only=weights_only, background=False)
    Saver(CheckpointManager(tmp_path), settings, policy, lambda message: None).save(1, {}, {})
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    num_parameters = model_facts(config.model_name, trust_remote_code=False).num_parameters
    assert checkpoint_size_bytes(num_parameters, config, weights_only=weights_only) == pytest.approx(on_disk, rel=0.05)


def test_the_size_of_a_checkpoint_does_not_depend_on_the_schedule():
    sizes = {checkpoint_size_bytes(1000, PolicyConfig(scheduler=schedule)) for schedule in ("linear", "constant", ())}
    assert len(sizes) == 1


def leave(held, error):
    with held.saver:
        held.save(1)
        held.allowed.set()
        raise error


def test_a_run_that_fails_commits_what_it_began(held):
    with pytest.raises(RuntimeError, match="the loss exploded"):
        leave(held, RuntimeError("the loss exploded"))
    assert held.messages == ["saved step 1"]


def test_the_error_of_a_run_is_not_hidden_by_that_of_its_save(held, caplog):
    held.error = OSError(5, "Input/output error")
    with pytest.raises(RuntimeError, match="the loss exploded"):
        leave(held, RuntimeError("the loss exploded"))
    assert "the pending checkpoint could not be written" in caplog.text


def test_an_interrupted_run_does_not_wait(held):
    def interrupt():
        with held.saver:
            held.save(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert held.folders() == []
    held.allowed.set()


@pytest.mark.parametrize("algorithm", slow_except(["grpo", "sft"], "grpo"))
def test_a_run_reports_every_checkpoint_that_is_there_and_each_is_that_of_a_run_that_waited(run, algorithm):
    settings = ("checkpoint.every=1", "checkpoint.keep_last=9")
    folder, _ = run(algorithm, "background", *settings)
    waited, _ = run(algorithm, "waited", *settings, "checkpoint.background=false")
    assert folder.watcher.messages == waited.watcher.messages == [f"saved step {step}" for step in range(1, 5)]
    expected, found = (
        {path.relative_to(each.path): path.read_bytes() for path in each.path.rglob("checkpoints/*/policy/*")}
        for each in (waited, folder)
    )
    assert len(expected) >= 4 * 4
    assert found == expected

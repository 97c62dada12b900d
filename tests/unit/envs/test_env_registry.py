import subprocess
import sys

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.arithmetic import ArithmeticEnv
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.registry import make_env
from lucidrl.errors import ConfigError
from tests.unit.envs.scorers import read_prompts

USER_MODULE = """
from lucidrl.envs.text.interfaces import EnvReply

class Scorer:
    def __init__(self, strictness=1):
        self.strictness = strictness

    async def step(self, batch):
        return [EnvReply(1.0) for _ in batch]

class Leaving(Scorer):
    def __init__(self):
        raise SystemExit(3)

class Blocking:
    def step(self, batch):
        return []
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    (tmp_path / "my_scorers.py").write_text(USER_MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_exit.py").write_text("raise SystemExit(0)")
    (tmp_path / "my_needy.py").write_text("import package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in ("my_scorers", "my_broken", "my_needy", "my_prompts"):
        sys.modules.pop(name, None)


def test_a_built_in_environment_takes_its_config_from_kwargs():
    env = make_env("arithmetic", {"max_operand": 3, "operations": ["*"]})
    assert isinstance(env, ArithmeticEnv)
    assert [prompt.prompt_id for prompt in env.prompts()][-1] == "3*3"


def test_a_users_class_is_found_in_the_working_directory(user_folder):
    env = make_env("my_scorers:Scorer", {"strictness": 2})
    assert (type(env).__name__, env.strictness) == ("Scorer", 2)


@pytest.mark.parametrize(
    ("name", "kwargs", "complaint"),
    [
        ("arithmetics", {}, "did you mean arithmetic"),
        ("chess", {}, "use arithmetic, guessing"),
        ("my_scorers:", {}, "module:Class"),
        ("arithmetic", {"max_operan": 3}, r"did you mean env\.kwargs\.max_operand"),
        ("my_socrers:Scorer", {}, "no module my_socrers"),
        ("my_needy:Scorer", {}, "my_needy needs package_that_is_not_there"),
        ("my_broken:Scorer", {}, "ZeroDivisionError"),
        ("my_scorers:Socrer", {}, "no class Socrer; it defines Scorer, Leaving, Blocking"),
        ("my_scorers:Blocking", {}, "async def step"),
        ("my_scorers:Scorer", {"leniency": 1}, "leniency"),
        ("my_scorers:Leaving", {}, "my_scorers:Leaving cannot be made with kwargs {}: SystemExit: 3"),
        ("my_exit:Scorer", {}, "module my_exit fails when imported, with SystemExit: 0"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_the_reason(user_folder, name, kwargs, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_env(name, kwargs)


def test_users_environments_run_in_workers_by_default():
    assert not EnvConfig().is_isolated
    assert EnvConfig(num_workers=2).is_isolated
    assert EnvConfig(isolation="process").is_isolated
    assert EnvConfig(name="my_scorers:Scorer").is_isolated
    assert not EnvConfig(name="my_scorers:Scorer", isolation="none").is_isolated


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_workers": 2, "isolation": "none"}, "num_workers=2 needs worker processes, but isolation=none"),
        ({"num_workers": 9}, "num_workers=9 is more than max_concurrency=8"),
        ({"num_workers": 0}, "greater than 0"),
    ],
)
def test_numbers_of_workers_that_do_not_fit_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        EnvConfig(**settings)


@pytest.mark.parametrize(
    ("old", "num_workers"), [({"num_actors": 0}, 1), ({"num_actors": 2}, 2), ({"num_actors": 2, "num_workers": 4}, 4)]
)
def test_settings_of_runs_with_actors_are_still_read(old, num_workers):
    config = EnvConfig.model_validate(old)
    assert config.num_workers == num_workers
    assert "num_actors" not in config.model_dump()


def test_an_environment_without_prompts_needs_a_file(user_folder):
    config = EnvConfig(name="my_scorers:Scorer", isolation="none")
    with pytest.raises(ConfigError, match=r"set data\.file"):
        read_prompts(config, ClusterConfig())


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [("[1]", "prompts returned a int; return a list of Prompt"), ("1 / 0", "prompts raised ZeroDivisionError")],
)
def test_invalid_prompts_are_refused(user_folder, monkeypatch, prompts, complaint):
    (user_folder / "my_prompts.py").write_text(
        f"{USER_MODULE}\nclass WithPrompts(Scorer):\n    prompts = lambda self: {prompts}"
    )
    monkeypatch.delitem(sys.modules, "my_prompts", raising=False)
    with pytest.raises(ConfigError, match=complaint):
        read_prompts(EnvConfig(name="my_prompts:WithPrompts", isolation="none"), ClusterConfig())


def test_configuring_an_environment_imports_no_torch():
    code = "import sys, lucidrl.envs.text.registry, lucidrl.envs.text.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

import subprocess
import sys

import pytest

from lucidrl.envs.text.arithmetic import ArithmeticEnv
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.registry import env_of, make_env, split_prompts
from lucidrl.errors import ConfigError

USER_MODULE = """
from lucidrl.envs.text.interfaces import EnvReply

class Judge:
    def __init__(self, strictness=1):
        self.strictness = strictness

    async def step(self, batch):
        return [EnvReply(1.0) for _ in batch]

class Curriculum(Judge):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

class Blocking:
    def step(self, batch):
        return []
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    (tmp_path / "my_judges.py").write_text(USER_MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_needy.py").write_text("import package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in ("my_judges", "my_broken", "my_needy"):
        sys.modules.pop(name, None)


def test_a_built_in_environment_takes_its_config_from_kwargs():
    env = make_env("arithmetic", {"max_operand": 3, "operations": ["*"]})
    assert isinstance(env, ArithmeticEnv)
    assert [prompt.prompt_id for prompt in env.prompts()][-1] == "3*3"


def test_a_users_class_is_found_in_the_working_directory(user_folder):
    env = make_env("my_judges:Judge", {"strictness": 2})
    assert (type(env).__name__, env.strictness) == ("Judge", 2)


@pytest.mark.parametrize(
    ("name", "kwargs", "complaint"),
    [
        ("arithmetics", {}, "did you mean arithmetic"),
        ("chess", {}, "known are arithmetic, guessing"),
        ("my_judges:", {}, "module:Class"),
        ("arithmetic", {"max_operan": 3}, r"did you mean env\.kwargs\.max_operand"),
        ("my_jugdes:Judge", {}, "no module my_jugdes"),
        ("my_needy:Judge", {}, "my_needy needs package_that_is_not_there"),
        ("my_broken:Judge", {}, "ZeroDivisionError"),
        ("my_judges:Jugde", {}, "no class Jugde; it defines Judge, Curriculum, Blocking"),
        ("my_judges:Blocking", {}, "async def step"),
        ("my_judges:Judge", {"leniency": 1}, "leniency"),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(user_folder, name, kwargs, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_env(name, kwargs)


def test_an_environment_that_keeps_something_has_no_copies_in_actors(user_folder):
    config = EnvConfig(name="my_judges:Curriculum")
    assert type(env_of(config)).__name__ == "Curriculum"
    with pytest.raises(ConfigError, match=r"env\.num_actors=2 needs an environment that keeps nothing.*=0, or take"):
        env_of(config.model_copy(update={"num_actors": 2}))
    assert type(env_of(EnvConfig(name="my_judges:Judge", num_actors=2))).__name__ == "Judge"


def test_an_environments_own_prompts_are_split():
    config = EnvConfig(kwargs={"max_operand": 9}, validation_fraction=0.2)
    train, validation = split_prompts(make_env(config.name, config.kwargs), config)
    assert len(train) + len(validation) == 100
    assert validation


def test_a_file_takes_the_place_of_an_environments_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}')
    config = EnvConfig(prompts_file=file, validation_fraction=0.0)
    train, _ = split_prompts(make_env("arithmetic", {}), config)
    assert [prompt.info for prompt in train] == [{"answer": 2}]


def test_an_environment_without_prompts_asks_for_a_file(user_folder):
    with pytest.raises(ConfigError, match=r"set env\.prompts_file"):
        split_prompts(make_env("my_judges:Judge", {}), EnvConfig(name="my_judges:Judge"))


def test_configuring_an_environment_imports_no_torch():
    code = "import sys, lucidrl.envs.text.registry, lucidrl.envs.text.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

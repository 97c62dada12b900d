"""Experiment folders never collide, and hyperparameters flatten as documented."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lucidrl.utils.logger import flatten_dict, get_next_experiment_dir


def test_folders_are_numbered_from_one_and_exist(tmp_path):
    base = tmp_path / "new" / "base"
    assert get_next_experiment_dir(str(base)) == str(base / "exp_001")
    assert get_next_experiment_dir(str(base)) == str(base / "exp_002")
    assert (base / "exp_002").is_dir()


def test_the_name_of_the_base_does_not_matter(tmp_path):
    for base in (tmp_path / "exp_042" / "runs", tmp_path / "exp_042"):
        assert get_next_experiment_dir(str(base)) == str(base / "exp_001")


def test_numbers_continue_after_the_largest_and_past_999(tmp_path):
    for name in ("exp_007", "exp_999", "exp_final", "my_exp_5000"):
        (tmp_path / name).mkdir()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_1000")
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_1001")


def test_a_file_with_the_next_name_is_skipped(tmp_path):
    (tmp_path / "exp_001").touch()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_002")


def test_numbers_are_counted_however_they_are_padded(tmp_path):
    (tmp_path / "exp_5").touch()
    (tmp_path / "exp_0003").mkdir()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_006")


@pytest.mark.parametrize(
    "name", ["exp_٣", "exp_²", "exp_" + "9" * 250, "exp_12345678901234567890", "exp_-7", "exp_7 ", "Exp_7"]
)
def test_names_that_only_look_like_ours_do_not_count(tmp_path, name):
    (tmp_path / name).mkdir()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_001")


def test_a_dangling_link_is_skipped(tmp_path):
    (tmp_path / "exp_001").symlink_to(tmp_path / "nothing")
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_002")


def test_concurrent_threads_get_different_folders(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(get_next_experiment_dir, [str(tmp_path)] * 50))
    assert len(set(folders)) == 50


RACE = """
import os, sys
from lucidrl.utils.logger.folders import get_next_experiment_dir

gate, opener = os.pipe()
for _ in range(50):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)  # returns when the parent has started everyone
        os.write(1, (get_next_experiment_dir(sys.argv[1]) + "\\n").encode())
        os._exit(0)
os.close(opener)
for _ in range(50):
    os.wait()
"""


def test_concurrent_processes_get_different_folders(tmp_path):
    base = tmp_path / "not there yet"
    result = subprocess.run([sys.executable, "-c", RACE, str(base)], check=True, capture_output=True, text=True)
    assert sorted(result.stdout.splitlines()) == [str(base / f"exp_{number:03d}") for number in range(1, 51)]


def test_flatten_dict_names_list_items_by_index():
    assert flatten_dict({"a": [1, {"b": 2}], "c": {"d": (3,)}}) == {"a.0": 1, "a.1.b": 2, "c.d.0": 3}
    assert flatten_dict({"a": {"b": 1}}, sep="/") == {"a/b": 1}
    assert flatten_dict({"a": {}, "b": [], "c": None}) == {"a": {}, "b": [], "c": None}


def test_flatten_dict_loses_no_value_to_another_of_the_same_name():
    assert flatten_dict({"a": {"b": 1}, "a.b": 2, "a.b#2": 3}) == {"a.b": 1, "a.b#2": 2, "a.b#2#2": 3}
    assert flatten_dict({1: "x", "1": "y", "c": [4], "c.0": 5}) == {"1": "x", "1#2": "y", "c.0": 4, "c.0#2": 5}

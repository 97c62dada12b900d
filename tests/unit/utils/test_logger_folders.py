"""Experiment folders never collide, and hyperparameters flatten as documented."""

from concurrent.futures import ThreadPoolExecutor

from lucidrl.utils.logger import flatten_dict, get_next_experiment_dir


def test_folders_are_numbered_from_one_and_exist(tmp_path):
    base = tmp_path / "new" / "base"
    assert get_next_experiment_dir(str(base)) == str(base / "exp_001")
    assert get_next_experiment_dir(str(base)) == str(base / "exp_002")
    assert (base / "exp_002").is_dir()


def test_the_name_of_the_base_does_not_matter(tmp_path):
    base = tmp_path / "exp_042" / "runs"
    assert get_next_experiment_dir(str(base)) == str(base / "exp_001")


def test_numbers_go_on_after_the_largest_and_past_999(tmp_path):
    for name in ("exp_007", "exp_999", "exp_final", "my_exp_5000"):
        (tmp_path / name).mkdir()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_1000")
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_1001")


def test_a_file_in_the_way_is_stepped_over(tmp_path):
    (tmp_path / "exp_001").touch()
    assert get_next_experiment_dir(str(tmp_path)) == str(tmp_path / "exp_002")


def test_a_race_gives_everyone_a_folder_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(get_next_experiment_dir, [str(tmp_path)] * 50))
    assert len(set(folders)) == 50


def test_flatten_dict_names_list_items_by_index():
    assert flatten_dict({"a": [1, {"b": 2}], "c": {"d": (3,)}}) == {"a.0": 1, "a.1.b": 2, "c.d.0": 3}
    assert flatten_dict({"a": {"b": 1}}, sep="/") == {"a/b": 1}
    assert flatten_dict({"a": {}, "b": [], "c": None}) == {"a": {}, "b": [], "c": None}

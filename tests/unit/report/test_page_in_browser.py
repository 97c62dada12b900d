"""The page works in a real browser: from disk, by mouse and keyboard, in both themes, on wide and narrow screens."""

from __future__ import annotations

import pytest

from lucidrl.report.page import write_report
from lucidrl.report.run_data import read_run
from tests.browser import KEYS, Browser, chromium
from tests.unit.report.page_runs import RIGHT_TO_LEFT, SCRIPT, page_run

pytestmark = pytest.mark.slow

COMPLETIONS = ["forty two", "fifty one", SCRIPT, RIGHT_TO_LEFT]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of one run."""
    folder = page_run(tmp_path_factory.mktemp("one") / "run", samples={1: COMPLETIONS, 20: COMPLETIONS[:2]})
    write_report([read_run(folder)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The page of two runs."""
    root = tmp_path_factory.mktemp("two")
    first = page_run(root / "first", samples={1: COMPLETIONS[:2]})
    second = page_run(root / "second", 20, "seed=7", samples={1: COMPLETIONS[2:]}, metrics={"own": 1.5})
    write_report([read_run(first), read_run(second)], root / "page.html")
    return root / "page.html"


@pytest.fixture(autouse=True)
def _nothing_is_wrong(browser, page, comparison):
    browser.resize(1300, 900)
    yield
    assert browser.errors() == []
    assert {url.rpartition("/")[2].partition("#")[0] for url in browser.requests()} <= {"report.html", "page.html"}


def values_of(browser: Browser, metric: str) -> str:
    return browser.text(f'[data-metric="{metric}"] .values')


def test_it_says_what_was_trained_and_what_came_of_it(browser, page):
    browser.open(page)
    assert browser.text("h1") == "GRPO: embedded on arithmetic"
    assert "finished 30 of 30 steps" in browser.text(".conclusion")
    assert browser.count("section") == 8
    assert "40% of completions were truncated" in browser.text("#events")


def test_every_chart_is_drawn(browser, page):
    browser.open(page)
    browser.wait("document.querySelectorAll('#curves .uplot canvas').length >= 4")
    blank = browser.run(
        "return [...document.querySelectorAll('.uplot canvas')].filter((canvas) => !canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)).length"
    )
    assert blank == 0
    browser.click("#rest summary")
    browser.wait("document.querySelector('#rest .uplot')")


def test_the_pointer_moves_the_cursor_of_all_charts(browser, page):
    browser.open(page)
    browser.wait("document.querySelector('[data-metric=\"train/loss\"] .u-over')")
    assert values_of(browser, "train/reward") == "1"
    browser.hover('[data-metric="train/loss"] .u-over', 0.5)
    browser.wait("document.getElementById('step-value').textContent !== 'last'")
    step = int(browser.text("#step-value"))
    assert 13 <= step <= 17
    assert float(values_of(browser, "train/reward")) == pytest.approx(step / 30, abs=1e-3)
    assert f"step {step}: 2.00 s" in browser.text("#phases .legend")
    browser.hover("h1", 0.1)
    browser.wait("[...document.querySelectorAll('#curves .u-cursor-x')].every((line) => line.offsetParent)")
    assert int(browser.text("#step-value")) == step


def test_the_keyboard_moves_the_cursor(browser, page):
    browser.open(page)
    browser.type("#step", KEYS["left"] * 2)
    assert browser.text("#step-value") == "28"
    assert values_of(browser, "train/tokens_per_s") == "2,800"


def test_metrics_can_be_filtered_and_smoothed(browser, page):
    browser.open(page)
    browser.type("#metric-filter", "loss")
    browser.wait("document.querySelector('#rest [data-metric]')")  # opened, because it may have such metrics
    assert browser.count("#curves [data-metric]") == 1
    browser.set("#smoothing", 0.9)
    assert browser.text("#smoothing + output") == "0.90"


def test_samples_are_filtered_by_step_reward_and_text(browser, page):
    browser.open(page)
    assert browser.text("#sample-count") == "6 of 6 samples"
    browser.set("#sample-step", "step 1")
    assert browser.text("#sample-count") == "4 of 6 samples"
    browser.set("#sample-least", "0.5")
    assert browser.text("#sample-count") == "2 of 6 samples"
    browser.type("#sample-text", "FIFTY")
    assert browser.text("#sample-count") == "1 of 6 samples"
    assert "fifty one" in browser.text("#sample-detail")
    browser.type("#sample-text", "nowhere")
    assert "No sample matches" in browser.text("#sample-detail")


def test_samples_are_sorted_and_walked_by_the_keyboard(browser, page):
    browser.open(page)
    browser.set("#sample-sort", "reward, highest first")
    assert browser.text(".rows [aria-selected=true] .num") == "1"
    browser.type(".rows [aria-selected=true]", KEYS["down"] * 4)
    assert browser.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    assert browser.text(".rows [aria-selected=true] .num") == "0"


def test_tokens_are_colored_by_log_probability_and_by_mismatch(browser, page):
    browser.open(page)
    browser.type("#sample-text", "forty")
    detail = "#sample-detail > .sample .tok"
    assert browser.count(detail) == len("forty two")
    assert browser.count(f"{detail}.lp1") > 0
    browser.set("#sample-coloring", "mismatch")
    assert browser.count(f"{detail}.mm4") == 1
    title = browser.run("return document.querySelector(arguments[0]).title", f"{detail}.mm4")
    assert "mismatch 0.3000" in title


def test_the_group_of_a_sample_is_beside_it(browser, page):
    browser.open(page)
    browser.type("#sample-text", "forty")
    assert "Group: 2 samples of this prompt, mean reward 0.5000" in browser.text("#sample-detail")
    assert browser.count(".group .sample") == 2
    browser.click(".group .sample:nth-child(2)")
    assert "fifty one" in browser.text("#sample-detail > .sample")


@pytest.mark.parametrize("coloring", ["nothing", "log-probability"])
def test_markup_and_right_to_left_text_in_samples_are_text(browser, page, coloring):
    browser.open(page)
    browser.set("#sample-coloring", coloring)
    browser.set("#sample-step", "step 1")
    browser.set("#sample-sort", "oldest first")
    browser.click(".rows .row:nth-child(4)")
    script = "return document.querySelector('#sample-detail > .sample pre:last-child')"
    assert browser.run(f"{script}.textContent") == SCRIPT
    assert browser.run("return document.title") == "run · Lucid RL"
    assert browser.count("img") == 0
    browser.click(".rows .row:nth-child(5)")
    assert browser.run(f"{script}.textContent") == RIGHT_TO_LEFT
    assert (
        browser.run("return getComputedStyle(document.querySelector('#sample-detail > .sample h4')).direction") == "ltr"
    )


def test_the_timeline_zooms_by_button_and_keyboard(browser, page):
    picture = "return document.querySelector('.timeline canvas').toDataURL()"
    browser.open(page)
    browser.wait("document.querySelector('.timeline canvas').height > 50")
    whole = browser.run(picture)
    browser.click("#timeline button")
    assert browser.run(picture) != whole
    browser.type(".timeline canvas", "0")
    assert browser.run(picture) == whole
    browser.type(".timeline canvas", "++" + KEYS["right"])
    assert browser.run(picture) != whole


def test_two_runs_are_overlaid_and_their_differences_aligned(browser, comparison):
    browser.open(comparison)
    assert browser.count(".card") == 2
    assert browser.text("#comparison").startswith("All runs end with the same held-out accuracy")
    browser.wait("document.querySelector('[data-metric=\"train/reward\"] .uplot')")
    assert len(values_of(browser, "train/reward").split()) == 2
    rows = browser.run(
        "return [...document.querySelectorAll('#config tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert rows == [["seed", "1", "7"]]
    browser.click("#only-differences")
    assert browser.count("#config tbody tr") > 50
    browser.set("#sample-run", "1")
    assert browser.text("#sample-count") == "2 of 4 samples"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 360])
def test_it_fits_the_screen_in_the_systems_theme(browser, comparison, theme, width):
    browser.resize(width, 800)
    browser.prefer(theme)
    browser.open(comparison)
    browser.wait("document.querySelector('.uplot')")
    assert browser.run("return document.documentElement.dataset.theme") == theme
    assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    light = browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (theme == "light")


def test_the_theme_can_be_switched_by_the_keyboard(browser, page):
    browser.prefer("light")
    browser.open(page)
    browser.type("#theme", KEYS["enter"])
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    browser.type("#theme", KEYS["enter"])


@pytest.mark.parametrize("kind", ["crashed", "empty", "one step"])
def test_pages_of_other_runs_have_all_sections(browser, tmp_path, kind):
    folder = page_run(tmp_path / "run", 1, error=RuntimeError("burnt") if kind == "crashed" else None)
    if kind == "empty":
        (folder / "metrics.jsonl").write_text("")
    write_report([read_run(folder)], folder / "report.html")
    browser.open(folder / "report.html")
    assert browser.count("section") == 8

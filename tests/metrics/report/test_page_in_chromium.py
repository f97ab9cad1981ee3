"""The page in a browser: it draws everything, logs no error, asks for nothing, fits a phone, and runs no run's text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium
from report_cases import HOSTILE, run_folder

from megarl.metrics.report.page import write_report

pytestmark = pytest.mark.browser
DRAW_ALL = "for (const [element, entry] of drawn) if (!entry.done) draw(element)"
PLOTS = "document.querySelectorAll('.js-plotly-plot').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run, other = run_folder(folder / "run"), run_folder(folder / "other", steps=20, name="other", lr=1e-5)
    return write_report(run, other)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_draws_all_without_an_error_a_request_or_a_horizontal_scroll(
    browser: Chromium, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    browser.value("for (const group of document.querySelectorAll('details')) group.open = true")
    browser.wait_for("document.querySelectorAll('.plot').length === drawn.size && drawn.size >= 9")
    browser.value(DRAW_ALL)
    browser.wait_for(f"{PLOTS} === drawn.size")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(14, 17, 22)" if dark else "rgb(246, 247, 249)")


def test_a_pointer_on_a_curve_shows_its_values(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    browser.value(DRAW_ALL)
    browser.wait_for(f"{PLOTS} === drawn.size")
    middle = (
        "(() => { const plot = document.querySelector('.plot'); plot.scrollIntoView({block: 'center'});"
        " const r = plot.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    x, y = browser.value(middle)
    for step in range(2):  # the pointer comes, and moves
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
    browser.wait_for("document.querySelector('.plot .hoverlayer').textContent.includes('critic/score/mean')")


def test_what_a_model_wrote_is_shown_and_never_run(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    browser.value(DRAW_ALL)
    texts = browser.value("[...document.querySelectorAll('.answer .text')].map((one) => one.textContent)")
    assert f"46 {HOSTILE}" in texts
    assert browser.value("window.struck === undefined && document.querySelectorAll('main img').length === 0")
    # What the policy of the page forbids, whoever would try it.
    browser.value("document.head.append(Object.assign(document.createElement('script'), {textContent: 'struck = 3'}))")
    assert browser.value("window.struck === undefined")
    assert browser.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"


def test_an_episode_is_shown_as_blocks_of_who_says_what_and_calls_what(browser: Chromium, page: Path) -> None:
    browser.open(page, width=400)
    blocks = (
        "[...document.querySelectorAll('#samples .message')].map((block) =>"
        " [...block.children].map((part) => `${part.className.replace('text ', '')}: ${part.textContent}`))"
    )
    assert browser.value(blocks) == [
        [": user", f"said: 12+34? {HOSTILE}"],
        [": assistant", "reasoning: a tool", f"call: add [12, 34] {HOSTILE}"],
        [": tool", f"said: 46 {HOSTILE}"],
        [": assistant", "said: It is 46."],
    ]
    own = "[...document.querySelectorAll('#samples .message.own b')].map((name) => name.textContent)"
    assert browser.value(own) == ["assistant", "assistant"]
    texts = browser.value("[...document.querySelectorAll('.answer > .text')].map((one) => one.textContent)")
    assert "all rows" not in texts, "the same again, as one text"
    assert browser.value("window.struck === undefined && document.querySelectorAll('main img').length === 0")
    assert browser.value("document.documentElement.scrollWidth") <= 400


def test_a_token_has_a_colour_for_each_measure_and_tells_its_numbers(browser: Chromium, page: Path) -> None:
    browser.open(page, width=400)
    token = "document.querySelectorAll('#tokens .token')[1]"
    colours = set()
    for measure in ("advantage", "probability", "ratio", "version"):
        change = f"const e = document.querySelector('#tokens select'); e.value = '{measure}'"
        browser.value("{" + change + "; e.dispatchEvent(new Event('change'))}")
        colours.add(browser.value(f"getComputedStyle({token}).backgroundColor"))
    assert len(colours) == 4
    assert browser.value(f"{token}.textContent") == HOSTILE
    browser.value(f"{token}.click()")
    told = browser.value("document.querySelector('#tokens .detail').innerText")
    assert "ratio 2" in " ".join(told.split()) and "advantage -2" in " ".join(told.split())
    contexts = browser.value("[...document.querySelectorAll('#tokens .context')].map((one) => one.textContent)")
    assert contexts == ["12+34=", f"tool: {HOSTILE}"]


def test_the_timeline_has_a_lane_for_each_rank_and_names_the_slowest(browser: Chromium, page: Path) -> None:
    browser.open(page, width=400)
    browser.value(DRAW_ALL)
    lanes = browser.value("document.querySelector('.later .plot').layout.yaxis.categoryarray")
    assert lanes == ["driver", "inside", "rank 0", "rank 1"]
    told = browser.value("document.querySelector('.later .small').textContent")
    assert told.startswith("Longest call: update actor, 0.75 s on rank 0, 0.5 s on the quickest.")


def test_controls_change_what_is_shown(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    set_to = "const e = document.querySelector('{}'); e.value = '{}'; e.dispatchEvent(new Event('{}'))"
    assert browser.value("document.querySelector('#samples b').textContent") == "step 40"
    browser.value("{" + set_to.format("#samples input", "0", "input") + "}")
    assert browser.value("document.querySelector('#samples b').textContent") == "step 1"
    keys = "[...document.querySelectorAll('#settings td.key')].map((cell) => cell.firstChild.textContent)"
    assert browser.value(keys) == ["actor.optim.lr"]  # what differs from the other run
    browser.value("{" + set_to.format("#settings select", "all", "change") + "}")
    assert len(browser.value(keys)) > 100
    browser.value("{" + set_to.format("#curves select", "0", "change") + "}")
    browser.value(DRAW_ALL)
    score = "[...document.querySelectorAll('.plot')].find((p) => p.data?.some((t) => t.name.includes('critic/score')))"
    assert browser.value(f"{score}.data.length") == 2  # the curve and that of the other run
    browser.value("{" + set_to.format("#curves select", "9", "change") + "}")
    assert browser.value(f"{score}.data.length") == 3  # the other has 20 points, too few to be smoothed

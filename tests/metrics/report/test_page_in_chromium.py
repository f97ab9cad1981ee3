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
# The titles of the curves that are wider than their cards, or do not fill them.
OUTSIDE = """[...document.querySelectorAll('.js-plotly-plot')].filter((plot) => {
    const [drawn, room] = [plot.querySelector('.main-svg'), plot].map((each) => each.getBoundingClientRect());
    const box = plot.closest('.card').getBoundingClientRect();
    return drawn.right > box.right || Math.abs(drawn.width - room.width) > 1;
}).map((plot) => plot.closest('.card').querySelector('h3').textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run, other = run_folder(folder / "run"), run_folder(folder / "other", steps=20, name="other", lr=1e-5)
    return write_report(run, [other])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_folder(tmp_path_factory.mktemp("alone") / "run"))


def card(title: str) -> str:
    return (
        f"[...document.querySelectorAll('.card')].find((c) => c.querySelector('h3')?.textContent.startsWith('{title}'))"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 420])
def test_the_page_draws_all_without_an_error_a_request_or_a_horizontal_scroll(
    browser: Chromium, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    browser.value("for (const group of document.querySelectorAll('details')) group.open = true")
    browser.wait_for("document.querySelectorAll('.plot').length === drawn.size && drawn.size >= 9")
    browser.value(DRAW_ALL)
    browser.wait_for(f"{PLOTS} === drawn.size")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(OUTSIDE) == []
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(14, 17, 22)" if dark else "rgb(246, 247, 249)")


def test_curves_stay_in_their_cards_when_the_window_becomes_narrow(browser: Chromium, alone: Path) -> None:
    browser.open(alone, width=1400)
    browser.value(DRAW_ALL)
    browser.wait_for(f"{PLOTS} === drawn.size")
    browser.call("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
    browser.wait_for(f"innerWidth === 420 && ({OUTSIDE}).length === 0")


def test_each_run_has_its_colour_its_legend_and_the_same_smoothing(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1400)
    browser.value(DRAW_ALL)
    assert browser.value(
        "[...document.querySelectorAll('#runs td.run')].map((run) => run.innerText.split('\\n')[0])"
    ) == [
        "try",
        "other",
    ]
    score, rate = card("Training score"), card("Learning rate")
    assert browser.value(f"[...{score}.querySelectorAll('.legend span')].map((each) => each.innerText)") == [
        "try\n1",
        "other\n1",
    ]
    choose = (
        "{ const e = document.querySelector('#curves select'); e.value = '9'; e.dispatchEvent(new Event('change')) }"
    )
    browser.value(choose)
    colours = f"{score}.querySelector('.plot').data.map((line) => line.line.color)"
    assert browser.value(colours) == ["#2563eb", "#2563eb", "#d9730d", "#d9730d"], "as it is and smoothed, of both runs"
    assert browser.value(f"{rate}.querySelector('.plot').data.length") == 2, "a schedule is shown as it is"
    assert browser.value(f"{score}.querySelector('.plot').layout.xaxis.title.text") == "step"
    assert browser.value(f"{rate}.querySelector('.plot').layout.yaxis.range") == [0, 2e-6], "of what does not move"


def test_a_metric_is_explained_in_the_words_of_the_loss_layer(browser: Chromium, alone: Path) -> None:
    browser.open(alone, width=420)
    entropy = card("Entropy")
    assert browser.value(f"{entropy}.querySelector('.why').checkVisibility()") is False
    browser.value(f"{entropy}.querySelector('.ask').click()")
    said = browser.value(f"{entropy}.querySelector('.why').innerText")
    assert said.startswith("actor/entropy exact entropy of the next token, nats. How to read it: falls as")


def test_the_page_opens_where_answers_differ_and_wrong_ones_are_red(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1400)
    step = "document.querySelector('#samples b').textContent"
    assert browser.value(step) == "step 38", "the last that is shown but 40, where all answers are right"
    colours = (
        "Object.fromEntries([...document.querySelectorAll('#samples .reward')].map((mark) =>"
        " [mark.textContent, getComputedStyle(mark).color]))"
    )
    assert browser.value(colours) == {
        "reward 0": "color(srgb 0.705882 0.137255 0.0941176)",
        "reward 1": "color(srgb 0.0588235 0.482353 0.309804)",
    }
    browser.value("[...document.querySelectorAll('#samples button')].find((each) => each.innerText === 'last').click()")
    assert browser.value(step) == "step 40"


def test_a_changed_file_is_shown_with_its_lines(browser: Chromium, page: Path) -> None:
    browser.open(page, width=420)
    shown = browser.value("document.querySelector('#settings details').innerText")
    assert shown.startswith("reward.py: changed in other") and "-# 1e-06\n+# 1e-05" in shown


def test_a_pointer_on_a_curve_shows_its_values(browser: Chromium, alone: Path) -> None:
    browser.open(alone, width=1280)
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
    assert browser.value("document.querySelector('#samples b').textContent") == "step 38"
    browser.value("{" + set_to.format("#samples input", "0", "input") + "}")
    assert browser.value("document.querySelector('#samples b').textContent") == "step 1"
    keys = "[...document.querySelectorAll('#settings td.key')].map((cell) => cell.firstChild.textContent)"
    assert browser.value(keys) == ["actor.optim.lr"]  # what differs from the other run
    browser.value("{" + set_to.format("#settings select", "all", "change") + "}")
    assert len(browser.value(keys)) > 100

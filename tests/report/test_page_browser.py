"""The page in a real browser: no errors, tables sort, nothing overflows, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(
    params=[
        (375, "light"),
        (1280, "dark"),
        pytest.param((375, "dark"), marks=pytest.mark.slow),
        pytest.param((1280, "light"), marks=pytest.mark.slow),
    ]
)
def page(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: asked.append(r.url))
    page.goto(report.as_uri())
    page.scheme = scheme
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()


def test_nothing_overflows_and_the_theme_is_followed(page: Any) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    # no text is wider than its place, but inside what scrolls
    out = page.evaluate(
        """[...document.querySelectorAll("body *")].filter(
            (e) => !e.closest("svg, .scroll, pre")
                && e.getBoundingClientRect().right > innerWidth + 1
        ).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert out == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    level = sum(int(v) for v in paper[4:-1].split(",")[:3]) / 3
    assert (level > 200) == (page.scheme == "light")
    ink = page.evaluate("getComputedStyle(document.querySelector('.panel svg')).color")
    assert (sum(int(v) for v in ink[4:-1].split(",")[:3]) / 3 < 100) == (page.scheme == "light")
    drawn = page.evaluate("document.querySelector('.panel svg').getBoundingClientRect().width")
    assert drawn > 250


def test_a_table_sorts_by_mouse_and_keyboard(page: Any) -> None:
    table = page.locator("table.sortable").last  # the runs
    head = table.locator("thead th").nth(2)

    def values() -> list[float]:
        cells = table.locator("tbody tr td:nth-child(3)").all_text_contents()
        return [float(text) for text in cells]

    before = values()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert values() == sorted(before, reverse=True)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(before)
    names = table.locator("thead th").nth(0)
    names.locator("button").click()
    assert head.get_attribute("aria-sort") is None
    found = table.locator("tbody tr td:nth-child(1)").all_text_contents()
    assert found == sorted(found)
    first = page.locator("table.sortable").first
    first.locator("thead th button").nth(6).click()  # Δ: the baseline has none, and comes last
    last = first.locator("tbody tr td:nth-child(1)").all_text_contents()[-1]
    assert last.strip() == "fedavg"


def test_a_narrow_screen_keeps_method_and_average_in_view(page: Any) -> None:
    place = page.locator(".scroll").first
    cue = page.locator(".cue").first
    narrow = page.viewport_size["width"] < 640
    for at in (0, 60, 10_000):
        place.evaluate("(e, x) => { e.scrollLeft = x; }", at)
        page.wait_for_timeout(50)
        for head in ("method", "average"):
            cell = page.locator("table.result th", has_text=head).bounding_box()
            assert cell["x"] >= 0 and cell["x"] + cell["width"] <= page.viewport_size["width"]
        assert cue.is_visible() == (narrow and at < 10_000)


def test_links_lead_to_their_parts(page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.locator("nav a", has_text="Clients").click()
    top = page.evaluate("document.querySelector('#g0-clients').getBoundingClientRect().top")
    assert -1 <= top < 800


def test_print_opens_what_is_folded(page: Any) -> None:
    page.emulate_media(media="print")
    assert not page.locator("nav").first.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every((d) => d.open)")

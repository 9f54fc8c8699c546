"""The chat page in Debian's Chromium: it streams, stops, keeps chats apart, and shows errors in the server's words."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE_MS = 60_000  # how long the shared machine may take to draw
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(skip_or_fail):
    chromium = shutil.which("chromium")
    if chromium is None or find_spec("playwright") is None:
        skip_or_fail("no chromium, or no playwright, on this machine")
    from playwright.sync_api import expect, sync_playwright  # noqa: PLC0415 - so that its absence is a skip

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def start(monkeypatch):
    """`start(key)`: the API in a process of its own; its address."""
    started = []

    def run(*arguments):
        process = subprocess.Popen([sys.executable, HERE / "scripted_api.py", *arguments], stdout=subprocess.PIPE)
        started.append(process)
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def open_tab(browser):
    """`open_tab(url)`: a tab of one window; after the test, no tab has logged an error or asked another server."""
    window = browser.new_context(viewport={"width": 1000, "height": 700})
    window.set_default_timeout(PATIENCE_MS)
    asked, wrong = [], []

    def new(url, *, path="/"):
        page = window.new_page()
        page.on("request", lambda request: asked.append((request.url, url)))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url + path)
        return page

    yield new
    window.close()
    assert [] == [address for address, own in asked if not address.startswith((own, "blob:" + own))]
    assert [] == wrong


@pytest.fixture
def expect(browser):
    from playwright.sync_api import expect  # noqa: PLC0415

    return expect


def message_of(page):
    return page.get_by_label("Message", exact=True)


def say(page, text, *, tokens=None):
    """Write a message and send it; with `tokens`, the answer has so many, else it does not end by itself."""
    if not page.get_by_label("Most tokens").is_visible():
        page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill(str(tokens or ""))
    message_of(page).fill(text)
    message_of(page).press("Enter")


def state(page, url):
    return page.request.get(f"{url}/state").json()


def wait_for(page, url, **expected):
    for _ in range(PATIENCE_MS // 50):
        found = state(page, url)
        if expected.items() <= found.items():
            return
        page.wait_for_timeout(50)
    assert expected == found


def violations(page):
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415

    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in Axe().run(page).response["violations"]]


def test_an_answer_streams_and_says_how_it_was_made(open_tab, expect, start):
    page = open_tab(start())
    expect(page.locator("#model")).to_contain_text("weights abababababab · exact")
    expect(page.locator("#health")).to_have_text("Ready")
    say(page, "x<b>bold</b>", tokens=5)
    log = page.get_by_role("log")
    expect(log).to_contain_text("x0 x1 x2 x3 x4")
    expect(log).to_contain_text("x<b>bold</b>")  # texts are never HTML
    expect(log).to_contain_text(f"5 tokens, 12.5 a second · seed {2**62 + 1} · the limit of tokens was reached")


def test_a_receipt_is_saved_as_the_server_wrote_it(open_tab, expect, start):
    page = open_tab(start())
    say(page, "x", tokens=2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save receipt").click()
    assert "receipt-0123456789ab.json" == download.value.suggested_filename
    assert f'{{"seed": {2**62 + 1}}}\n' == Path(download.value.path()).read_text()


@pytest.mark.parametrize("how", ["button", "escape", "closed tab"])
def test_stopping_an_answer_ends_it_in_the_server(open_tab, expect, start, how):
    url = start()
    page, other = open_tab(url), open_tab(url)
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("x10 ")
    assert 1 == state(page, url)["running"]
    if how == "button":
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("log")).to_contain_text("Stopped.")
    elif how == "escape":
        page.keyboard.press("Escape")
        expect(page.get_by_role("log")).to_contain_text("Stopped.")
    else:
        page.close()
    wait_for(other, url, running=0, cancelled=1)


def test_two_tabs_have_chats_of_their_own_and_a_reload_keeps_them(open_tab, expect, start):
    url = start()
    one, two = open_tab(url), open_tab(url)
    say(one, "a", tokens=30)
    say(two, "b", tokens=30)
    expect(one.get_by_role("log")).to_contain_text("a29 ")
    expect(two.get_by_role("log")).to_contain_text("b29 ")
    for page, own, other in ((one, "a29 ", "b"), (two, "b29 ", "a")):
        page.reload()
        expect(page.get_by_role("log")).to_contain_text(own)
        assert not {f"{other}{number}" for number in range(30)} & set(page.get_by_role("log").inner_text().split())


def test_a_duplicated_tab_begins_a_chat_of_its_own(open_tab, expect, start):
    """Browsers copy the storage of a tab, with the ids of its chats, to its duplicate."""
    url = start()
    original = open_tab(url)
    say(original, "secret", tokens=3)
    expect(original.get_by_role("log")).to_contain_text("s2 ")
    copied = original.evaluate("sessionStorage.getItem('ttlaunch-chats')")
    duplicate = open_tab(url, path="/state")
    duplicate.evaluate("text => sessionStorage.setItem('ttlaunch-chats', text)", copied)
    duplicate.goto(url)
    expect(message_of(duplicate)).to_be_focused()
    expect(duplicate.get_by_role("log")).to_have_text("")
    ids = [
        json.loads(page.evaluate("sessionStorage.getItem('ttlaunch-chats')"))["chats"] for page in (original, duplicate)
    ]
    assert ids[0][0]["id"] != ids[1][0]["id"]


def test_chats_of_a_tab_are_listed_and_forgotten(open_tab, expect, start):
    page = open_tab(start())
    say(page, "alpha", tokens=3)
    expect(page.get_by_role("log")).to_contain_text("a2 ")
    page.get_by_role("button", name="New chat").first.click()
    say(page, "beta", tokens=3)
    expect(page.get_by_role("log")).to_contain_text("b2 ")
    page.get_by_role("button", name="alpha").click()
    expect(page.get_by_role("log")).to_contain_text("a2 ")
    page.get_by_role("button", name="Forget this chat").click()
    expect(page.get_by_role("button", name="alpha")).to_have_count(0)
    expect(page.get_by_role("log")).to_contain_text("b2 ")


def test_a_killed_stage_is_named_in_the_servers_words(open_tab, expect, start):
    url = start()
    page = open_tab(url)
    killed = "rank 1 (stage, localhost) was killed by SIGKILL in step 12"
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("x10 ")
    page.request.post(f"{url}/fail")
    expect(page.get_by_role("log")).to_contain_text(killed)
    expect(page.locator("#health")).to_have_text(f"Not ready: {killed}")
    assert [] == violations(page)


def test_a_server_that_has_ended_is_reported(open_tab, expect, start):
    process_url = start()
    page = open_tab(process_url)
    expect(page.locator("#health")).to_have_text("Ready")
    page.route("**/chat", lambda route: route.abort())
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("the server does not answer; is `ttlaunch serve` still running?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("refuse me", "the prompt has 900 tokens, and the context 64"),
        ("too many", "32 requests wait; try again in 3 s"),
    ],
)
def test_a_refused_message_goes_back_to_where_it_was_written(open_tab, expect, start, text, expected):
    page = open_tab(start())
    say(page, text)
    expect(page.get_by_role("alert")).to_have_text(expected)
    expect(message_of(page)).to_have_value(text)
    expect(page.get_by_role("log")).to_have_text("")


def test_everything_can_be_done_with_the_keyboard(open_tab, expect, start):
    page = open_tab(start())
    expect(message_of(page)).to_be_focused()
    page.keyboard.type("x1")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("y")
    expect(message_of(page)).to_have_value("x1\ny")
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("x10 ")
    expect(message_of(page)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.get_by_role("log")).to_contain_text("Stopped.")
    expect(message_of(page)).to_be_focused()
    for name in ("Send", "Forget this chat"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name=name)).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # opens the settings
    page.keyboard.press("Tab")
    expect(page.get_by_label("Most tokens")).to_be_focused()


def test_a_key_is_asked_for_and_kept_in_this_tab_only(open_tab, expect, start):
    url = start("open sesame")
    page = open_tab(url)
    expect(page.locator("#health")).to_have_text("Not ready: a key is needed")
    say(page, "x", tokens=3)
    expect(page.get_by_role("dialog")).to_be_visible()
    assert [] == violations(page)
    page.get_by_label("Key", exact=True).fill("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#health")).to_have_text("Ready")
    message_of(page).press("Enter")
    expect(page.get_by_role("log")).to_contain_text("x2 ")
    expect(open_tab(url).locator("#health")).to_have_text("Not ready: a key is needed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_axe_finds_no_violation(open_tab, expect, start, scheme, width):
    page = open_tab(start())
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 700})
    assert [] == violations(page)
    say(page, "x", tokens=5)
    expect(page.get_by_role("button", name="Save receipt")).to_be_visible()
    assert [] == violations(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_can_run_no_code_but_its_files(open_tab, start):
    page = open_tab(start())
    later = "() => new Promise(done => setTimeout(() => {{ try {{ done({}) }} catch (error) {{ done(error.name) }} }}))"
    assert "EvalError" == page.evaluate(
        later.format("eval('1')")
    )  # the driver's own code may use it, a later call may not
    assert "TypeError" == page.evaluate(later.format("document.body.innerHTML = '<b>'"))

"""The chat page in Debian's Chromium (D14): it streams, stops, keeps chats apart, and shows errors in the server's words."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chromium import PATIENCE_MS
from ttlaunch.serving.receipt import hash_tokens, read_receipt

from .served import serving

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/images"
SLOW = ("--pace", "0.05")  # a text that does not end while it is looked at
KILLED = "rank 1 (stage, localhost) was killed by SIGKILL in step 12"
pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """`start(*head, door=…)`: a door, and a head that repeats the first letter of a prompt; in every fourth place is a digit."""
    with ExitStack() as ending:
        yield lambda *head, **options: ending.enter_context(serving(tmp_path, head=head, **options))[0]


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


def message_of(page):
    return page.get_by_label("Message", exact=True)


def say(page, text, *, tokens=None):
    """Write a message and send it; with `tokens`, the answer has so many, else it does not end by itself."""
    if not page.get_by_label("Most tokens").is_visible():
        page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill(str(tokens or ""))
    message_of(page).fill(text)
    message_of(page).press("Enter")


def wait_for_no_stream(page, served):
    for _ in range(PATIENCE_MS // 50):
        lines = page.request.get(f"{served.url}/metrics").text().splitlines()
        if "ttlaunch_serve_streams 0" in lines:
            return
        page.wait_for_timeout(50)
    pytest.fail("\n".join(lines))


def violations(page):
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415

    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in Axe().run(page).response["violations"]]


def test_an_answer_streams_and_says_how_it_was_made(open_tab, expect, start):
    page = open_tab(start().page)
    expect(page.locator("#model")).to_contain_text("echo · data_parallel · step 40 · weights ")
    expect(page.locator("#model")).to_contain_text("exact: the training’s own bits")
    expect(page.locator("#health")).to_have_text("Ready")
    page.get_by_text("Settings").click()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("0")
    say(page, "x<b>bold</b>", tokens=5)
    log = page.get_by_role("log")
    expect(log).to_contain_text("xxxxx")
    expect(log).to_contain_text("x<b>bold</b>")  # texts are never HTML
    expect(log).to_contain_text("a second · seed 7 · the limit of tokens was reached")


def test_a_receipt_that_was_saved_can_be_read(open_tab, start):
    page = open_tab(start().page)
    say(page, "x", tokens=3)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save receipt").click()
    receipt = read_receipt(Path(download.value.path()))
    assert ((ord("x"),), hash_tokens([ord("x")] * 3)) == (receipt.prompt_tokens, receipt.tokens_sha256)
    assert f"receipt-{receipt.tokens_sha256[:12]}.json" == download.value.suggested_filename


@pytest.mark.parametrize("how", ["button", "escape", "closed tab"])
def test_stopping_an_answer_ends_it_in_the_server(open_tab, expect, start, how):
    served = start(*SLOW)
    page, other = open_tab(served.page), open_tab(served.page)
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("xxx")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("log")).to_contain_text("Stopped.")
    elif how == "escape":
        page.keyboard.press("Escape")
        expect(page.get_by_role("log")).to_contain_text("Stopped.")
    else:
        page.close()
    wait_for_no_stream(other, served)


def test_two_tabs_have_chats_of_their_own_and_a_reload_keeps_them(open_tab, expect, start):
    url = start().page
    one, two = open_tab(url), open_tab(url)
    say(one, "a", tokens=30)
    say(two, "b", tokens=30)
    for page, own, other in ((one, "a", "bbb"), (two, "b", "aaa")):
        expect(page.get_by_role("log")).to_contain_text("30 tokens")
        page.reload()
        expect(page.get_by_role("log")).to_contain_text(own * 3)
        assert other not in page.get_by_role("log").inner_text()


def test_a_duplicated_tab_begins_a_chat_of_its_own(open_tab, expect, start):
    """Browsers copy the storage of a tab, with the ids of its chats, to its duplicate."""
    url = start().page
    original = open_tab(url)
    say(original, "secret", tokens=3)
    expect(original.get_by_role("log")).to_contain_text("3 tokens")
    copied = original.evaluate("sessionStorage.getItem('ttlaunch-chats')")
    duplicate = open_tab(url, path="/config")
    duplicate.evaluate("text => sessionStorage.setItem('ttlaunch-chats', text)", copied)
    duplicate.goto(url)
    expect(message_of(duplicate)).to_be_focused()
    expect(duplicate.get_by_role("log")).to_have_text("")
    stored = [page.evaluate("sessionStorage.getItem('ttlaunch-chats')") for page in (original, duplicate)]
    ids = [json.loads(text)["chats"][0]["id"] for text in stored]
    assert ids[0] != ids[1]


def test_chats_of_a_tab_are_listed_and_forgotten(open_tab, expect, start):
    page = open_tab(start().page)
    say(page, "alpha", tokens=3)
    expect(page.get_by_role("log")).to_contain_text("aaa")
    page.get_by_role("button", name="New chat").first.click()
    say(page, "beta", tokens=3)
    expect(page.get_by_role("log")).to_contain_text("bbb")
    page.get_by_role("button", name="alpha").click()
    expect(page.get_by_role("log")).to_contain_text("aaa")
    page.get_by_role("button", name="Forget this chat").click()
    expect(page.get_by_role("button", name="alpha")).to_have_count(0)
    expect(page.get_by_role("log")).to_contain_text("bbb")


def test_a_killed_stage_is_named_in_the_servers_words(open_tab, expect, start):
    served = start(*SLOW)
    page = open_tab(served.page)
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("xxx")
    served.kill_head()
    served.tell("failed", KILLED)
    expect(page.get_by_role("log")).to_contain_text(KILLED)
    expect(page.locator("#health")).to_have_text(f"Not ready: {KILLED}")
    assert [] == violations(page)


def test_an_answer_goes_on_after_a_restart(open_tab, expect, start):
    served = start(*SLOW)
    page = open_tab(served.page)
    say(page, "x", tokens=100)
    expect(page.get_by_role("log")).to_contain_text("xxx")
    served.tell("restarting", KILLED)
    served.kill_head()
    expect(page.get_by_role("log")).to_contain_text(f"{KILLED}, restarting")
    served.start_head()
    served.tell("running")
    expect(page.get_by_role("log")).to_contain_text("100 tokens")
    expect(page.get_by_role("log")).not_to_contain_text("restarting")


def test_a_server_that_has_ended_is_reported(open_tab, expect, start):
    page = open_tab(start().page)
    expect(page.locator("#health")).to_have_text("Ready")
    page.route("**/chat", lambda route: route.abort())
    say(page, "x")
    expect(page.get_by_role("log")).to_contain_text("the server does not answer; is `ttlaunch serve` still running?")


def test_a_refused_message_goes_back_to_where_it_was_written(open_tab, expect, start):
    page = open_tab(start().page)
    say(page, "x" * 600)
    expect(page.get_by_role("alert")).to_contain_text("512")
    expect(message_of(page)).to_have_value("x" * 600)
    expect(page.get_by_role("log")).to_have_text("")


def test_everything_can_be_done_with_the_keyboard(open_tab, expect, start):
    page = open_tab(start(*SLOW).page)
    expect(message_of(page)).to_be_focused()
    page.keyboard.type("x1")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("y")
    expect(message_of(page)).to_have_value("x1\ny")
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("xxx")
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


def test_a_key_is_asked_for_and_kept_in_this_tab_only(open_tab, expect, start, tmp_path):
    key = tmp_path / "key"
    key.write_text("open-sesame-0123456789abcdef")
    key.chmod(0o600)
    bearer = {"authorization": f"Bearer {key.read_text()}"}
    url = start(door=("--key-file", str(key)), headers=bearer).page
    page = open_tab(url)
    expect(page.locator("#health")).to_have_text("Not ready: a key is needed")
    say(page, "x", tokens=3)
    expect(page.get_by_role("dialog")).to_be_visible()
    assert [] == violations(page)
    page.get_by_label("Key", exact=True).fill(key.read_text())
    page.keyboard.press("Enter")
    expect(page.locator("#health")).to_have_text("Ready")
    message_of(page).press("Enter")
    expect(page.get_by_role("log")).to_contain_text("xxx")
    expect(open_tab(url).locator("#health")).to_have_text("Not ready: a key is needed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_axe_finds_no_violation(open_tab, expect, start, scheme, width, request):
    """With `--rewrite`, the pictures of the documentation are taken anew."""
    page = open_tab(start().page)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 700})
    assert [] == violations(page)
    say(page, "x", tokens=5)
    expect(page.get_by_role("button", name="Save receipt")).to_be_visible()
    assert [] == violations(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture = PICTURES / f"chat-page-{scheme}.png"
    if width > 500 and request.config.getoption("--rewrite"):
        PICTURES.mkdir(exist_ok=True)
        page.get_by_text("Settings").click()
        page.screenshot(path=picture)


def test_the_page_can_run_no_code_but_its_files(open_tab, start):
    page = open_tab(start().page)
    later = "() => new Promise(done => setTimeout(() => {{ try {{ done({}) }} catch (error) {{ done(error.name) }} }}))"
    assert "EvalError" == page.evaluate(
        later.format("eval('1')")
    )  # the driver's own code may use it, a later call may not
    assert "TypeError" == page.evaluate(later.format("document.body.innerHTML = '<b>'"))

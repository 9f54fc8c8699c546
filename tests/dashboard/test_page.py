"""The page in Debian's Chromium: true numbers, at once, also after a break; hostile pages and lines do nothing (X1-X3, X5, X8, X9, X11)."""

import html
import http.server
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chromium import PATIENCE_MS, REBOUND
from tests.dashboard.made_run import HOSTILE, MadeRun, elastic_run, serving_run
from ttlaunch import contract
from ttlaunch.app.run_diagnostics import run_diagnostics
from ttlaunch.dashboard.actions import Actions
from ttlaunch.dashboard.application import make_application
from ttlaunch.dashboard.export import export_run
from ttlaunch.dashboard.reading import Reading
from ttlaunch.diagnostics import render
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.names import summarise
from ttlaunch.running.report import read_report
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.launcher import write_launcher
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.web.addresses import LOOPBACK, listen
from ttlaunch.web.server import make_server

KEY = "k" * 43
KILLED = Path(__file__).with_name("killed.json")
VIEWS = ("", "metrics", "topology", "steps", "logs", "configuration", "checkpoints")
pytestmark = pytest.mark.slow


@contextmanager
def shown(runs, port=0, *, actions=None):
    """Offer the page in a thread; the address of the runs."""
    listening = listen("127.0.0.1", port)
    number = listening.getsockname()[1]
    server = make_server(make_application(Reading(runs), names=LOOPBACK, key=KEY, actions=actions))
    thread = threading.Thread(target=lambda: _serve(server, listening))
    thread.start()
    try:
        yield f"http://127.0.0.1:{number}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listening.close()


def _serve(server, listening):
    import asyncio  # noqa: PLC0415 - of this thread only

    asyncio.run(server.serve(sockets=[listening]))


@pytest.fixture
def open_tab(browser):
    """`open_tab(url, hash)`: a tab with the key; after the test, no tab has logged an error or asked another server."""
    window = browser.new_context(viewport={"width": 1300, "height": 900})
    window.set_default_timeout(PATIENCE_MS)
    asked, wrong = [], []

    def new(url, view="#/"):
        page = window.new_page()
        page.on("request", lambda request: asked.append((request.url, url)))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{url}#key={KEY}")
        page.evaluate("view => { location.hash = view }", view)
        return page

    yield new
    window.close()
    assert [] == [address for address, own in asked if not address.startswith(own)]
    assert [] == wrong


@pytest.fixture
def runs(tmp_path):
    """A run that is done, one whose rank 2 was killed, and one that nobody should trust."""
    folder = tmp_path / "runs"
    done = MadeRun(folder / "2026-01-01T00-00-00-aaaa")
    done.steps(1, 40)
    done.telemetry(40)
    done.print(0, "".join(f"INFO line {number}\n" for number in range(900)))
    for rank in (0, 1):
        done.print(rank, "both say this\n", time=1e9 + 50)
    done.print(1, "ERROR no room\n", stream="stderr", time=1e9 + 60)
    (done.path / "checkpoints/step-40").mkdir(parents=True)
    (done.path / "checkpoints/step-40/manifest.json").write_text(json.dumps({"sha256": "ab" * 32}))
    done.end()
    killed = MadeRun(folder / "2026-01-01T00-00-01-bbbb", roles=("worker",) * 3)
    killed.steps(1, 27, ranks=(0, 1, 2))
    hostile = MadeRun(folder / HOSTILE, name=HOSTILE, roles=(HOSTILE, "worker"), hosts=[HOSTILE, HOSTILE])
    hostile.steps(1, 2)
    hostile.print(0, f"<script>document.title='owned'</script>{HOSTILE}\n")
    (hostile.path / "train.yaml").write_text(f"a: {HOSTILE}\n")
    return folder


def kill(runs):
    folder = runs / "2026-01-01T00-00-01-bbbb"
    report = json.loads(KILLED.read_text()) | {"run_id": folder.name}
    (folder / "report.json.tmp").write_text(json.dumps(report))
    (folder / "report.json.tmp").rename(folder / contract.REPORT_FILE)
    return RunFolder(folder.name, folder)


def test_the_reason_of_a_failed_run_is_two_clicks_away_in_the_words_of_the_terminal(
    open_tab, expect, runs, monkeypatch
):
    monkeypatch.chdir(runs.parent)
    folder = kill(runs)
    with shown(runs) as url:
        page = open_tab(url)
        page.get_by_label("Filter").fill("failed")
        page.get_by_role("link", name="data_parallel").click()
        failure = page.get_by_role("region", name="What went wrong")
        expect(failure.locator("pre").first).to_contain_text("rank 2 (worker, localhost) was killed by SIGKILL")
        told = failure.locator("pre.error").inner_text()
        expect(failure).to_contain_text("wait for recv of 16 bytes from rank 2")
        page.get_by_text("What R004 means").click()
        expect(failure.locator("pre.prose")).to_be_visible()
    first = run_diagnostics(read_report(folder.path), read_facts(folder.path), folder)[0]
    assert render([first]) == told


def test_a_run_that_is_not_there_is_said_so_with_the_way_to_all_runs(open_tab, expect, runs):
    with shown(runs) as url:
        page = open_tab(url, "#/run/2025-01-01T00-00-00-cccc/overview")
        expect(page.get_by_role("alert")).to_contain_text("2025-01-01T00-00-00-cccc")
        page.get_by_role("alert").get_by_role("link", name="All runs").click()
        expect(page.get_by_label("Filter")).to_be_visible()


def test_every_number_of_a_run_on_the_page_is_that_of_ttlaunch_metrics(open_tab, expect, runs):
    run = runs / "2026-01-01T00-00-00-aaaa"
    with shown(runs) as url:
        page = open_tab(url, f"#/run/{run.name}/metrics")
        page.get_by_text("All numbers").click()
        expect(page.locator("#all-numbers table")).to_be_visible()
        rows = page.locator("#all-numbers tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.querySelector('data')?.value ?? cell.textContent))"
        )
    expected = summarise(EventLog(run).poll())
    shown_rows = [(name, int(rank), int(count), *map(float, values)) for name, rank, count, *values in rows]
    assert [(one.name, one.rank, one.count, *one.values) for one in expected] == shown_rows


def test_a_step_is_on_the_page_within_a_second_and_a_killed_rank_within_two_also_after_the_server_was_killed(
    open_tab, expect, runs
):
    run = MadeRun(runs / "2026-01-01T00-00-09-live")
    write_launcher(run.path)  # this process
    run.steps(1, 3)
    with shown(runs) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        page = open_tab(url, f"#/run/{run.path.name}/metrics")
        value = page.get_by_role("figure").filter(has_text="train/loss").locator("[data-series='0']")
        expect(value).to_have_text("1.333")
        expect(page.locator("#link")).to_have_text("live")
        began = time.monotonic()
        run.steps(4, 4)
        expect(value).to_have_text("1")
        took = time.monotonic() - began
    run.steps(5, 6)
    expect(page.locator("#link")).to_contain_text("not connected")
    with shown(runs, port):
        expect(page.locator("#link")).to_have_text("live")
        run.steps(7, 8)
        expect(value).to_have_text("0.5")
        page.locator("figure").filter(has_text="train/loss").get_by_text("Table").click()
        rows = page.locator("figure").filter(has_text="train/loss").locator("tbody tr")
        expect(rows).to_have_count(16)  # two ranks, eight steps: none is missing, none is there twice
        page.context.set_offline(True)  # as where a laptop sleeps
        run.steps(9, 10)
        page.wait_for_timeout(500)
        page.context.set_offline(False)
        run.steps(11, 11)
        expect(rows).to_have_count(22)
        steps = rows.locator("td:nth-child(2)").all_inner_texts()
        assert sorted(2 * [str(step) for step in range(1, 12)]) == sorted(steps)
        other = open_tab(url, "#/run/2026-01-01T00-00-01-bbbb")
        expect(other.get_by_role("region", name="Ranks")).to_be_visible()
        killed = time.monotonic()
        kill(runs)
        expect(other.get_by_role("region", name="What went wrong")).to_contain_text("killed by SIGKILL")
        named = time.monotonic() - killed
    assert took <= 1.0
    assert named <= 2.0


def test_logs_are_filtered_folded_linked_and_paged_while_they_grow(open_tab, expect, runs):
    run = MadeRun.__new__(MadeRun)
    run.path = runs / "2026-01-01T00-00-00-aaaa"
    with shown(runs) as url:
        page = open_tab(url, f"#/run/{run.path.name}/logs")
        lines = page.locator(".lines li")
        expect(lines).to_have_count(299)  # 300 of 903, of which two are folded
        expect(lines.last).to_contain_text("ERROR no room")
        expect(page.locator(".lines")).to_contain_text("×2 ranks 0,1")
        run.print(0, "INFO one more\n", time=1e9 + 70)
        expect(lines.last).to_contain_text("one more")
        for _ in range(3):
            page.get_by_role("button", name="Older lines").click()
            page.wait_for_timeout(100)
        expect(lines.first).to_contain_text("line 0")
        expect(page.get_by_role("button", name="Older lines")).to_be_hidden()
        page.get_by_label("Level").select_option("error")
        expect(lines).to_have_count(1)
        page.get_by_label("Level").select_option("debug")
        page.get_by_label("Text", exact=True).fill("line 77")
        expect(lines).to_have_count(11)
        lines.nth(3).get_by_role("link").click()
        expect(page.locator(".linked")).to_contain_text("line 772")


def test_hostile_names_and_lines_are_text(open_tab, expect, runs):
    with shown(runs) as url:
        page = open_tab(url)
        page.get_by_role("link", name=HOSTILE).first.click()
        for view in VIEWS:
            page.evaluate(
                "view => { location.hash = location.hash.split('/').slice(0, 3).join('/') + view }", f"/{view}"
            )
            expect(page.locator(".tabs [aria-current]")).to_be_visible()
            page.wait_for_timeout(150)
            assert 0 == page.locator("img, iframe, main script").count(), view
        page.get_by_role("link", name="Logs").click()
        expect(page.locator(".lines")).to_contain_text("<script>document.title='owned'</script>")
        assert page.title().endswith("ttlaunch")


ATTACK = """<!doctype html><title>evil</title><img id=i src="{url}api/runs"><iframe name=t></iframe><iframe id=n src="{url}"></iframe>
<form method=post action="{url}api/runs" target=t><input name=a></form>
<form method=post action="{url}api/actions/launch" enctype="text/plain" target=t><input name='{{"recipe": "data_parallel", "a": "' value='"}}'></form>
<form method=post action="{url}api/runs/{run}/stop" enctype="text/plain" target=t><input name='{{"now": true, "a": "' value='"}}'></form>
<script>
const more = [{{}}, {{ mode: "no-cors" }}, {{ credentials: "include" }}, {{ headers: {{ authorization: "Bearer wrong" }} }}];
const tries = ["runs", "runs/{run}", "actions/launch", "runs/{run}/stop", "runs/{run}/resume"].flatMap((path) =>
  ["GET", "POST", "DELETE", "PUT"].flatMap((method) => more.map((one) =>
    fetch("{url}api/" + path, {{ method, body: method === "GET" ? undefined : "{{}}", ...one }}).then((a) => a.text()).catch((e) => "refused"))));
for (const form of document.forms) form.submit();
Promise.all(tries).then((answers) => {{ (window === top ? window : parent).postMessage(answers, "*"); }});
window.answers = [];
addEventListener("message", (event) => {{ window.answers.push(...event.data); }});
</script>"""


def attack_of(url, run):
    """A page that tries, and the same in a frame whose origin is `null`."""
    text = ATTACK.format(url=url, run=run)
    return f'{text}<iframe sandbox="allow-scripts allow-forms" srcdoc="{html.escape(text)}"></iframe>'


class Spy(Actions):
    """Notes what it is asked for."""

    def __init__(self, runs):
        super().__init__(runs)
        self.asked = []

    def launch(self, order):
        self.asked.append("launch")
        return "x"

    def stop(self, path, *, now=False):
        self.asked.append(f"stop {path.name}")

    def resume(self, path):
        self.asked.append("resume")
        return "x"


ORDER = """([run, key]) => fetch(`/api/runs/${run}/stop`, {method: "POST", body: "{}", headers: {
  "content-type": "application/json", ...(key ? {authorization: `Bearer ${key}`} : {})}}).then((answer) => answer.status)"""


def test_a_page_of_another_origin_learns_nothing_and_does_nothing(browser, runs):
    run, spy = "2026-01-01T00-00-00-aaaa", Spy(runs)
    with shown(runs, actions=spy) as url:
        text = attack_of(url, run)

        class Evil(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as evil:
            threading.Thread(target=evil.serve_forever, daemon=True).start()
            window = browser.new_context()
            own = window.new_page()  # the user has the page open beside it
            own.goto(f"{url}#key={KEY}")
            page = window.new_page()
            page.goto(f"http://127.0.0.1:{evil.server_port}/")
            page.wait_for_function("window.answers.length >= 160", timeout=PATIENCE_MS)  # of the page and of the frame
            answers = page.evaluate("window.answers")
            frames = [frame.content() for frame in page.frames if frame.url.startswith(url)]
            assert {"refused", ""} >= set(answers)
            assert 0 == page.evaluate("document.getElementById('i').naturalWidth")
            assert not any("Runs" in content for content in frames)
            assert [] == window.cookies()
            rebound = page.goto(url.replace("127.0.0.1", REBOUND))
            assert 421 == rebound.status
            assert [] == spy.asked
            assert 401 == own.evaluate(ORDER, [run, ""])
            assert [] == spy.asked
            assert 200 == own.evaluate(ORDER, [run, KEY])  # the same order of the page itself
            assert [f"stop {run}"] == spy.asked
            window.close()
            evil.shutdown()


def violations(page):
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - only this test needs it

    found = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]][:4]) for one in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_on_any_view(open_tab, expect, runs, scheme):
    kill(runs)
    elastic = elastic_run(runs / "2026-01-01T00-00-08-eeee")
    served = serving_run(runs / "2026-01-01T00-00-09-ffff")
    with shown(runs) as url:
        page = open_tab(url)
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        expect(page.get_by_role("table")).to_be_visible()
        assert [] == violations(page)
        views = [("2026-01-01T00-00-00-aaaa", view) for view in VIEWS] + [("2026-01-01T00-00-01-bbbb", "")]
        views += [(served.path.name, view) for view in ("", "streams")] + [(elastic.path.name, "topology")]
        for run, view in views:
            page.evaluate("view => { location.hash = view }", f"#/run/{run}/{view}")
            expect(page.locator(f".tabs [aria-current][href$='{run}{'/' if view else ''}{view}']")).to_be_visible()
            expect(page.locator(".view > *").first).to_be_visible()
            page.wait_for_timeout(150)
            if view == "streams":
                chat = page.get_by_role("link", name="Open the chat page")
                expect(chat).to_have_attribute("href", "http://127.0.0.1:5050")
                assert "noopener noreferrer" == chat.get_attribute("rel")
                expect(page.get_by_role("region", name="Texts")).to_contain_text("5 texts, 210 tokens")
            assert [] == violations(page), (run, view)
        expect(page.get_by_role("region", name="Who waits for whom now")).to_contain_text("waits for rank 2")
        members = page.get_by_role("region", name="Members that come and go")
        expect(members).to_contain_text("1–4was killed by SIGKILL")
        expect(members.get_by_role("group", name="Epochs").locator("tbody tr")).to_have_count(3)
        expect(page.locator(".topology .rank")).to_have_count(3)  # workers that may come yet are not shown
        assert [] == violations(page)


def test_a_mistake_in_the_form_is_told_there_and_the_form_works_by_keyboard_alone(open_tab, expect, runs):
    with shown(runs, actions=Actions(runs)) as url:
        page = open_tab(url)
        page.get_by_role("link", name="Launch a run").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Launch a run")).to_be_visible()
        expect(page.locator("label span code", has_text="num_epochs")).to_be_visible()  # not between backticks
        page.get_by_label("Ranks", exact=True).focus()
        page.keyboard.type("0")
        page.keyboard.press("Tab")  # to the search for keys
        page.keyboard.type("training_config.steps")
        page.keyboard.press("Tab")
        page.keyboard.type("-3")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("`0` is no number of ranks")
        assert [] == violations(page)
        page.get_by_label("Ranks", exact=True).fill("")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("training_config.steps=-3")
        page.emulate_media(color_scheme="dark")
        assert [] == violations(page)
        page.set_viewport_size({"width": 360, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_is_reached_and_read_by_keyboard_alone(open_tab, expect, runs):
    kill(runs)
    with shown(runs) as url:
        page = open_tab(url)
        page.get_by_label("Filter").focus()
        page.keyboard.type("failed")
        expect(page.locator(".runs tbody tr")).to_have_count(1)
        seen = []
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.textContent"))
            if seen[-1] == "data_parallel":
                break
        assert "data_parallel" == seen[-1]
        page.keyboard.press("Enter")
        expect(page.get_by_role("region", name="What went wrong")).to_be_visible()
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Logs":
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        page.keyboard.press("Enter")
        expect(page.locator(".tabs [aria-current]")).to_have_text("Logs")
        assert "none" != outline


def test_a_narrow_window_scrolls_in_one_direction_only(open_tab, expect, runs):
    with shown(runs) as url:
        page = open_tab(url)
        page.set_viewport_size({"width": 360, "height": 700})
        for view in VIEWS:
            page.evaluate("view => { location.hash = view }", f"#/run/2026-01-01T00-00-00-aaaa/{view}")
            expect(page.locator(".tabs [aria-current]")).to_be_visible()
            page.wait_for_timeout(100)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_a_run_that_was_exported_opens_from_the_disk_and_loads_nothing(browser, expect, runs, tmp_path):
    run = runs / "2026-01-01T00-00-00-aaaa"
    file = tmp_path / "run.html"
    file.write_bytes(export_run(run))
    asked, wrong = [], []
    with browser.new_context() as window:
        page = window.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        page.goto(file.as_uri())
        expect(page.locator("h1")).to_contain_text("data_parallel")
        for name in ("Topology", "Timeline", "Configuration", "Checkpoints"):
            page.get_by_role("link", name=name).click()
            expect(page.get_by_role("link", name=name)).to_have_attribute("aria-current", "page")
            expect(page.locator(".view")).not_to_be_empty()
        page.get_by_role("link", name="Metrics").click()
        expect(page.locator(".charts canvas").first).to_be_visible()
        page.get_by_role("link", name="Logs").click()
        lines = page.locator(".lines li")
        expect(lines.last).to_contain_text("ERROR no room")
        page.get_by_label("Text", exact=True).fill("LINE 77")
        expect(lines).to_have_count(11)
    assert {file.as_uri()} == {address for address in asked if not address.startswith(("data:", "blob:"))}
    assert [] == wrong

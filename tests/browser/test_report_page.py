"""The report as a person sees it: opened from disk in Chromium, with the network off."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leanstep
from leanstep.ir import Reading, Sweep, Trial, Verdict
from leanstep.models import find_target
from leanstep.planner import frontier, ladder
from leanstep.units import format_bytes, format_bytes_up, format_change, format_seconds

pytest.importorskip("plotly", reason="the page needs plotly: pip install leanstep[report]")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

ROOT = Path(__file__).resolve().parents[2]
# Kept for people to look at; CI keeps them too.
SCREENSHOTS = ROOT / "out" / "report"
PLOTS = (
    *("memory-plot", "peak-groups-plot", "peak-owners-plot", "lifetimes-plot", "budget-plot"),
    *("batches-peak-plot", "batches-time-plot", "batches-rate-plot"),
)
GIB = 1024**3
DRAWN_LINES = """document.getElementById("budget-plot").data
    .map(({name, x, y, line}) => ({name, x, y, shape: line ? line.shape : null}))"""


def chromium_path() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI"):
        pytest.fail("there is no Chromium: .ci/run installs Debian's package, see its output")
    pytest.skip("needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = chromium_path()
    with playwright.sync_playwright() as driver:
        # Without a sandbox of its own, which root in a container cannot have.
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page that is drawn, and what it complained about."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        session = self.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=120_000)
        metrics = session.send("Performance.getMetrics")["metrics"]
        by_name = {metric["name"]: metric["value"] for metric in metrics}
        # What opening it took of the page's own thread, whoever else had the processor.
        self.processor_seconds = by_name["TaskDuration"]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def scroll_to(self, selector: str) -> dict[str, float]:
        self.page.evaluate("id => document.querySelector(id).scrollIntoView()", selector)
        return self.page.locator(selector).bounding_box()


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., Opened]]:
    """Open pages; each must have stayed quiet and asked for nothing but itself."""
    pages: list[Opened] = []

    def start(path: Path, width: int = 1280, scheme: str = "light") -> Opened:
        pages.append(Opened(browser, path, width, scheme))
        return pages[-1]

    yield start
    for one in pages:
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(("file:", "data:"))] == []
        one.context.close()


@pytest.fixture(scope="module")
def profile():
    return leanstep.profile(find_target("gpt2-mini", batch=8), device="h200")


@pytest.fixture(scope="module")
def plan(profile):
    """A plan that recomputes and offloads."""
    found = leanstep.plan(profile, "55%")
    assert found.host_bytes and any(decision.dropped_bytes for decision in found.decisions)
    return found


def verdict_of(plan) -> Verdict:
    return Verdict(
        budget_bytes=plan.budget_bytes,
        baseline_peak_bytes=plan.unplanned_peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=plan.peak_bytes - 4096,
        baseline_seconds=plan.step_seconds,
        predicted_seconds=plan.step_seconds + plan.extra_seconds,
        measured_seconds=plan.step_seconds + 1.02 * plan.extra_seconds,
        **dict.fromkeys(("loss_equal", "gradients_equal"), True),
        **dict.fromkeys(("buffers_equal", "random_state_equal"), True),
        different=(),
        within_spread=(),
        assumptions=("one batch",),
    )


def reading(gib: float, seconds: float, *, measured: bool = False) -> Reading:
    return Reading(int(gib * GIB), seconds, measured)


SWEEP = Sweep(
    *("gpt2-mini", "NVIDIA H200 (estimated)", GIB, "optimal"),
    tuple(
        Trial(
            batch,
            reading(0.06 * batch, 0.5e-3 * batch),
            reading(min(1.0, 0.06 * batch), 0.55e-3 * batch),
            textbook=reading(0.04 * batch, 0.65e-3 * batch),
        )
        for batch in (4, 8, 16, 32)
    ),
)


@pytest.fixture(scope="module")
def report_path(profile, plan, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    others = (frontier(profile, points=4, solvers=["optimal", "chen_sqrt"]), SWEEP)
    leanstep.report([profile, plan, verdict_of(plan), *others], path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_chart_is_drawn_and_fits_the_width(opened, report_path, width, scheme) -> None:
    one = opened(report_path, width, scheme)

    for name in PLOTS:
        drawn = one.page.locator(f"#{name} .main-svg .trace, #{name} .main-svg .bars")
        assert drawn.count() > 0, name
        assert one.page.locator(f"#{name}").bounding_box()["width"] <= width
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    paper = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) is (scheme == "dark")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    one.page.screenshot(path=SCREENSHOTS / f"report-{width}-{scheme}.png", full_page=True)


def test_on_a_wide_page_all_figures_of_the_verdict_stand_in_one_line(opened, report_path) -> None:
    one = opened(report_path, 1280)

    boxes = [figure.bounding_box() for figure in one.page.locator("#facts > div").all()]

    assert len(boxes) == 5 and len({box["y"] for box in boxes}) == 1
    assert boxes[-1]["x"] + boxes[-1]["width"] <= 1280


@pytest.mark.parametrize("width", [390, 360])
def test_on_a_telephone_every_link_of_the_navigation_can_be_seen(
    opened, report_path, width
) -> None:
    one = opened(report_path, width)

    links = [link.bounding_box() for link in one.page.locator("nav a:visible").all()]

    assert len(links) == 6
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in links)
    one.page.locator("nav a").first.click()
    header = one.page.locator("header").bounding_box()
    assert one.page.locator("#memory-title").bounding_box()["y"] >= header["height"]


def test_the_verdict_is_the_first_thing_a_person_reads(opened, report_path, plan) -> None:
    one = opened(report_path)

    assert one.text("#word") == "Fits."
    assert format_bytes(plan.budget_bytes) in one.text("#sentence")
    assert "equal, bit for bit" in one.text("#facts")
    box = one.page.locator("#facts").bounding_box()
    assert box["y"] + box["height"] < 900


def test_the_slider_moves_the_numbers(opened, report_path, profile, plan) -> None:
    one = opened(report_path)
    rungs = ladder(profile, also=(plan.budget_bytes,)).rungs[::-1]
    slider = one.page.locator("#budget-slider")
    slider.focus()
    assert int(slider.input_value()) == [r.budget_bytes for r in rungs].index(plan.budget_bytes)

    seen = []
    for key, place in (("Home", 0), ("ArrowRight", 1), ("End", len(rungs) - 1)):
        one.page.keyboard.press(key)
        rung = rungs[place]
        change = format_change(rung.extra_seconds / profile.step_seconds)
        assert one.text("#budget-value") == format_bytes(rung.budget_bytes)
        assert format_bytes(rung.peak_bytes) in one.text("#budget-peak")
        assert change in one.text("#budget-time")
        assert format_seconds(profile.step_seconds + rung.extra_seconds) in one.text("#budget-time")
        assert f"about {int(8 * rung.batch_growth)}" in one.text("#budget-batch")
        assert change in slider.get_attribute("aria-valuetext")
        shares = one.page.locator("#budget-shares .share")
        assert shares.count() == len(rung.shares)
        says = shares.first.get_attribute("title")
        assert f"{format_bytes(rung.shares[0].dropped_bytes)} recomputed" in says
        seen.append(one.text("#budget-figures"))
    assert len(set(seen)) == 3


def test_no_plan_is_drawn_below_the_proved_bound(opened, report_path, plan) -> None:
    one = opened(report_path)

    traces = {trace["name"]: trace for trace in one.page.evaluate(DRAWN_LINES)}
    bound = traces.pop("proved bound")
    # Steps that hold to the left: what is proved of a budget is so of every smaller one.
    assert bound["shape"] == "vh"
    assert bound["x"] == sorted(bound["x"])
    pairs = (zip(trace["x"], trace["y"], strict=True) for trace in traces.values())
    points = [point for trace in pairs for point in trace]
    assert len(points) > 4
    for peak, extra in points:
        steps = zip(bound["x"], bound["y"], strict=True)
        holding = [y for x, y in steps if x >= peak - 1e-9]
        assert not holding or extra >= holding[0] - 1e-9
    assert {trace["shape"] for trace in traces.values() if len(trace["x"]) > 1} == {"hv"}


def test_the_peak_says_what_its_colours_mean(opened, report_path) -> None:
    one = opened(report_path, 400)

    assert {"parameters", "activations"} <= set(one.text("#peak-legend").splitlines())


@pytest.mark.parametrize(("panel", "which"), [(0.2, "untouched"), (0.75, "planned")])
def test_pointing_at_an_op_names_tensors_and_clicking_lists_all(
    opened, report_path, profile, panel, which
) -> None:
    one = opened(report_path)
    box = one.scroll_to("#memory-plot")
    x, y = box["x"] + 0.4 * box["width"], box["y"] + panel * box["height"]

    one.page.mouse.move(x - 8, y)
    one.page.mouse.move(x, y)
    one.page.locator("#tip").wait_for(state="visible")

    tip = one.text("#tip")
    graph = profile.graph
    modules = {graph.path(op) for op in graph.ops if graph.path(op)}
    sources = {op.source for op in graph.ops if op.source}
    assert any(module in tip for module in modules) and any(source in tip for source in sources)
    assert "MiB" in tip

    one.page.mouse.click(x, y)
    one.page.locator("#alive").wait_for(state="visible")
    title, listed = one.text("#alive-title"), one.page.locator("#alive-rows tr").count()
    assert f"in {listed} parts, {which}" in title
    assert listed > 20
    one.page.locator("#alive-next").click()
    assert one.text("#alive-title") != title


def test_what_is_listed_adds_up_to_the_level_of_its_op(opened, report_path) -> None:
    one = opened(report_path)

    wrong = one.page.evaluate(
        """() => ["before", "after"].flatMap((which) => report.steps[which].ops.map((_, point) => {
            const rows = aliveAt(report.steps, which, point);
            const sum = rows.reduce((total, row) => total + row.bytes, 0);
            return [which, point, sum - levelAt(report.steps[which], point)];
        })).filter(([, , difference]) => difference !== 0)"""
    )

    assert wrong == []


def test_a_drag_looks_closer_and_a_double_click_comes_back(opened, report_path) -> None:
    one = opened(report_path)
    box = one.scroll_to("#memory-plot")
    y = box["y"] + 0.2 * box["height"]
    shown = "document.querySelector('#memory-plot').layout.xaxis.range.map(Number)"
    whole = one.page.evaluate(shown)

    one.page.mouse.move(box["x"] + 300, y)
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + 400, y, steps=4)
    one.page.mouse.up()

    one.page.wait_for_function(f"{shown}[1] < {whole[1] / 2}")
    closer = one.page.evaluate(shown)
    assert whole[0] < closer[0] < closer[1] < whole[1]
    one.page.mouse.dblclick(box["x"] + 350, y)
    one.page.wait_for_function(f"{shown}[1] === {whole[1]}")


def test_search_shows_what_matches_and_where_it_is(opened, report_path, plan) -> None:
    one = opened(report_path)
    rows = one.page.locator("#decisions-table tbody tr:visible")
    closed = rows.count()
    assert closed == 1 + len(plan.decisions)

    one.page.fill("#decisions-search", "no such op")
    assert rows.count() == 0 and one.text("#decisions-count").startswith("0 of")
    one.page.fill("#decisions-search", "layers.3 feed")
    found = rows.locator("td.name").all_inner_texts()
    assert len(found) > 2 and all("feedforward" in name for name in found[2:])
    one.page.fill("#decisions-search", "gelu")
    names = [name for name in rows.locator("td.name").all_inner_texts() if "gelu" in name]
    assert len(names) == len(plan.decisions)
    assert rows.count() == 1 + 2 * len(plan.decisions)

    one.page.fill("#decisions-search", "")
    assert rows.count() == closed
    rows.nth(1).locator("button").click()
    assert rows.count() > closed


def test_the_button_switches_between_light_and_dark(opened, report_path) -> None:
    one = opened(report_path)
    before = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert one.text("#theme") == "Dark"

    one.page.locator("#theme").click()

    assert one.text("#theme") == "Light"
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_the_page_writes_sizes_and_times_as_the_terminal_does(opened, report_path) -> None:
    one = opened(report_path)
    sizes = [0, 1023, 1024, 1536, 10**6, 123_456_789, 1024**3 - 1, 42 * GIB + 7, -(3 << 20)]
    times = [0.0, 2e-9, 1.5e-6, 0.9994, 0.00123, 1.0, 1.5, 12.34, 59.99, 61.0, 3600.0]

    found = one.page.evaluate("sizes => sizes.map(formatBytes)", sizes)
    assert found == [format_bytes(size) for size in sizes]
    found = one.page.evaluate("times => times.map(formatSeconds)", times)
    assert found == [format_seconds(seconds) for seconds in times]


def test_a_report_of_little_says_what_to_type_for_the_rest(opened, profile, plan, tmp_path) -> None:
    for name, results, missing in (
        ("profile", profile, {"decisions", "batches"}),
        ("plan", plan, {"memory", "lifetimes", "budget", "batches"}),
        ("sweep", SWEEP, {"memory", "peak", "lifetimes", "budget", "decisions"}),
    ):
        path = tmp_path / f"{name}.html"
        leanstep.report(results, path)

        one = opened(path, 400)

        said = one.page.locator("section:has(.missing)").evaluate_all("all => all.map(s => s.id)")
        assert set(said) == missing
        own = format_bytes_up(plan.budget_bytes).replace(" ", "")
        budget = f"--budget {own if name == 'plan' else 'BUDGET'}"
        for line in one.page.locator(".missing").all_inner_texts():
            assert "leanstep report" in line
            assert "leanstep sweep" not in line or budget in line


def test_bert_large_is_written_fast_small_and_opens_fast(opened, tmp_path) -> None:
    known = leanstep.profile(find_target("bert-large", batch=64), device="h200")
    planned = leanstep.plan(known, "50%")
    path = tmp_path / "bert-large.html"

    # Processor time: the tests share their cores with others.
    start = time.process_time()
    leanstep.report([known, planned], path)
    assert time.process_time() - start <= 10

    assert path.stat().st_size <= 15e6
    assert min(opened(path).processor_seconds for _ in range(3)) <= 3

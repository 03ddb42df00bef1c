"""The report: notebooks executed or failed by name, one page that needs nothing else, and an index."""

import asyncio
import base64
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from bs4 import BeautifulSoup

import browser
from batchlab import paths, plan, scenario
from batchlab.errors import UsageError
from batchlab.report import execute, index, merge, parameters, render, setup
from batchlab.store import Store
from batchlab.study import Study
from test_scenario import GOOD


def notebook(path: Path, *cells: str, tags: tuple[str, ...] = ("parameters",)) -> Path:
    """A notebook with a parameters cell and these code cells."""
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3",
                                                             "language": "python"}})
    first = nbformat.v4.new_code_cell('scenario = "cpu"\nrepeats = 3', id="parameters")
    first.metadata["tags"] = list(tags)
    book.cells = [nbformat.v4.new_markdown_cell("# A title", id="title"), first]
    book.cells += [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(cells)]
    nbformat.write(book, path)
    return path


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build folder of its own (its name with braces, which Papermill would format) and a scenario to name."""
    folder = tmp_path / "build {x}"
    monkeypatch.setattr(paths, "BUILD", folder)
    return folder / "cpu"


def run(path: Path, **options):
    return execute.execute(path, "cpu", progress=io.StringIO(), **options)


def test_execution_runs_this_python_from_the_root_with_the_parameters(tmp_path, build):
    where = "import os, sys\nprint(sys.executable, os.getcwd())"
    source = notebook(tmp_path / "07-probe.ipynb", where, "print(scenario, repeats)")
    done = run(source, extra={"repeats": 5})
    assert done == build / "07.ipynb"
    cells = nbformat.read(done, as_version=4).cells
    assert cells[-2].outputs[0].text.split() == [sys.executable, str(paths.ROOT)]
    assert cells[-1].outputs[0].text.split() == ["cpu", "5"]
    injected = next(c for c in cells if "injected-parameters" in c.metadata.get("tags", []))
    assert injected["id"] == parameters.INJECTED_ID
    assert sorted(p.name for p in build.iterdir()) == ["07.ipynb"]


def test_a_scenario_by_path_is_found_from_any_directory(tmp_path, build, monkeypatch):
    source = notebook(tmp_path / "07-probe.ipynb", "print(scenario)")
    shutil.copy(paths.SCENARIOS / "cpu.yml", tmp_path / "mine.yml")
    monkeypatch.chdir(tmp_path)
    done = execute.execute(source, "mine.yml", progress=io.StringIO())
    assert done == build.parent / "mine/07.ipynb"
    told = nbformat.read(done, as_version=4).cells[-1].outputs[0].text
    assert told == f"{tmp_path / 'mine.yml'}\n"


@pytest.mark.parametrize(("cells", "options", "expected"), [
    (("x = 1", "# a comment\nraise ValueError('no\\nluck')"), {}, "cell 3 (`# a comment`): ValueError: no luck"),
    (("import os; os._exit(3)",), {}, "cell 2 (`import os; os._exit(3)`): the kernel died"),
    (("import time; time.sleep(60)",), {"timeout_s": 1}, "ran past its time limit (--timeout)"),
])
def test_a_failure_is_one_line_and_never_counts_as_built(tmp_path, build, cells, options, expected):
    source = notebook(tmp_path / "08-bad.ipynb", *cells)
    with pytest.raises(execute.NotebookFailed) as failure:
        run(source, **options)
    message = str(failure.value)
    assert "\n" not in message and message.startswith("08-bad.ipynb (cpu): cell ") and expected in message
    assert sorted(p.name for p in build.iterdir()) == ["08.failed.ipynb"]
    assert merge.executed(build) == [] and merge.failures(build) == ["08"]
    assert nbformat.read(build / "08.failed.ipynb", as_version=4).cells


def test_success_removes_the_failure_before_it(tmp_path, build):
    source = notebook(tmp_path / "08-bad.ipynb", "x = 1")
    build.mkdir(parents=True)
    (build / "08.failed.ipynb").write_text("{}")
    run(source)
    assert sorted(p.name for p in build.iterdir()) == ["08.ipynb"]


def test_a_kernel_that_does_not_start_is_tried_once_more(tmp_path, build, monkeypatch):
    calls, real = [], papermill.execute_notebook

    def flaky(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Kernel didn't respond in 120 seconds")
        return real(*args, **kwargs)

    monkeypatch.setattr(papermill, "execute_notebook", flaky)
    assert run(notebook(tmp_path / "07-probe.ipynb", "x = 1")).exists() and len(calls) == 2
    monkeypatch.setattr(papermill, "execute_notebook", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no kernel")))
    with pytest.raises(execute.NotebookFailed, match="before the first cell: RuntimeError: no kernel"):
        run(notebook(tmp_path / "09-never.ipynb", "x = 1"))


def test_another_python3_kernel_of_the_user_is_not_taken(tmp_path, build, monkeypatch):
    spec = tmp_path / "jupyter/kernels/python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    assert run(notebook(tmp_path / "07-probe.ipynb", "x = 1")).exists()


def test_parameters_are_checked_before_anything_runs(tmp_path, build):
    source = notebook(tmp_path / "07-probe.ipynb", "x = 1")
    with pytest.raises(UsageError, match="no parameter `repeat`; did you mean `repeats`"):
        run(source, extra={"repeat": 5})
    with pytest.raises(UsageError, match='write "inf" or null'):
        run(source, extra={"repeats": float("inf")})
    with pytest.raises(UsageError, match="no-such-scenario"):
        execute.execute(source, "no-such-scenario")
    with pytest.raises(UsageError, match="no parameter `scenario`; it has: none"):
        run(notebook(tmp_path / "06-none.ipynb", "x = 1", tags=()))
    with pytest.raises(UsageError, match="no such notebook"):
        run(tmp_path / "none.ipynb")
    assert not build.exists()


@pytest.mark.parametrize(("text", "expected"), [
    ("a=3", ("a", 3)), ("a=0.10", ("a", 0.1)), ("a=[1, 2]", ("a", [1, 2])), ("a=null", ("a", None)),
    ("a=inf", ("a", "inf")), ("a=Infinity", ("a", "Infinity")), ("a=0.10.1", ("a", "0.10.1")), ("a=x=y", ("a", "x=y"))])
def test_parameters_on_the_command_line_are_json_or_text(text, expected):
    assert parameters.parse(text) == expected


@pytest.mark.parametrize("text", ["a", "=3", "a b=3"])
def test_other_parameters_on_the_command_line_are_refused(text):
    with pytest.raises(UsageError, match="--set name=value"):
        parameters.parse(text)


def test_progress_reaches_a_log_as_finished_lines():
    log = io.StringIO()
    relay = execute.Relay(log)
    for piece in ("\r\x1b[K1/3 …", "\r\x1b[K2/3 …", "\r\x1b[Kcell one: 3 s\n", "\r\x1b[Kcell", " two: 4 s\nrest"):
        relay.write(piece)
    assert log.getvalue() == "cell one: 3 s\ncell two: 4 s\n"


def test_progress_reaches_a_terminal_as_it_is():
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    execute.Relay(terminal).write("\r\x1b[K1/3 …")
    assert terminal.getvalue() == "\r\x1b[K1/3 …"


def test_headings_go_one_level_down_outside_code():
    assert merge.deeper("## A\n```\n# no heading\n```\n# B\n#c") == "### A\n```\n# no heading\n```\n## B\n#c"
    assert merge.without_title("# Throughput\n\n**Question.** x", "Throughput").strip() == "**Question.** x"


def test_code_without_output_joins_the_code_after_it(tmp_path):
    path = notebook(tmp_path / "01.ipynb", "import os", "x = 1", "print(x)", "print(2)")
    book = nbformat.read(path, as_version=4)
    for cell in book.cells[-2:]:
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    nbformat.write(book, path)
    whole, sections = merge.merge([path])
    assert [c.source for c in whole.cells] == ["import os\n\nx = 1\n\nprint(x)", "print(2)"]
    assert [(s.anchor, s.title) for s in sections] == [("part-01", "A title")]


PAGE = '<html><body><div class="cell" id="02-figure">{}</div></body></html>'


@pytest.mark.parametrize(("content", "expected"), [
    ('<img src="data:x">', "an image in cell 02-figure has no alternative text"),
    ('<img src="data:x" alt=" ">', "no alternative text"),
    ('<img src="https://a.b/c.png" alt="x">', "cell 02-figure would fetch https://a.b/c.png"),
    ('<img src="c.png" alt="x">', "would fetch c.png"),
    ('<script src="//cdn/x.js"></script>', "would fetch //cdn/x.js"),
    ('<link rel="stylesheet" href="x.css">', "would fetch x.css"),
    ("<style>@import 'x'</style>", "would fetch something"),
    ("<style>p { background: url('x.png') }</style>", "would fetch something"),
])
def test_pages_that_need_more_than_themselves_are_refused(tmp_path, content, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        render.check(PAGE.format(content), tmp_path)


def test_self_contained_pages_pass(tmp_path):
    render.check(PAGE.format('<img src="data:x" alt="y"><a href="https://a.b">z</a>'), tmp_path)


def test_text_in_the_report_cannot_end_its_script():
    assert "</script>" not in render.safe_json({"title": "</script><!-- x"})
    assert json.loads(render.safe_json({"title": "</script><!-- x"})) == {"title": "</script><!-- x"}


def test_rendering_without_executed_notebooks_says_what_to_do(build, monkeypatch):
    with pytest.raises(UsageError, match="make report SCENARIO=cpu"):
        render.render("cpu")


def test_index_without_reports(build):
    assert "No report is built yet" in index.index().read_text()


@pytest.mark.parametrize(("arguments", "code", "expected"), [
    (("execute", "99", "--scenario", "cpu"), 2, "no such notebook; there are: 01-setup"),
    (("execute", "02", "--scenario", "nope"), 2, "batchlab: "),
    (("execute", "02", "--scenario", "cpu", "--timeout", "0"), 2, "--timeout 0: give a positive number"),
    (("render", "--scenario", "nope"), 2, "batchlab: "),
])
def test_bad_input_is_one_line_and_exit_2(arguments, code, expected):
    done = subprocess.run([sys.executable, "-m", "batchlab.report", *arguments], cwd=paths.ROOT, text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == code and expected in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


# The whole of it, on the quick scenario --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def report(quick_build) -> BeautifulSoup:
    return BeautifulSoup((quick_build.build / "report.html").read_text(), "html.parser")


def test_summary_stands_on_top(report):
    summary = report.find(id="summary")
    assert summary.h1.get_text() == "A quick scenario of invented test data"
    facts = {d.dt.get_text(): d.dd.get_text() for d in summary.select(".facts div")}
    assert facts["Machine"] == "invented machine, 2 cores" and facts["Engines"] == "vLLM 0.0.test"
    assert facts["Evidence"] == "measured" and facts["Transport"] == "HTTP"
    assert facts["Cells"] == "86 valid, 1 invalid, 3 missing"
    assert facts["Recorded"] == "2026-11-29" and facts["Commit"] == "0123abc"
    goals = [row.find_all("td")[1].get_text() for row in summary.select("tbody tr")]
    assert "highest output throughput" in goals and "lowest mean TTFT at 20 req/s" in goals


def test_contents_list_points_to_every_section(report):
    links = [a["href"] for a in report.select("nav ol a")]
    assert links == ["#summary", *(f"#part-{p.name[:2]}" for p in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb")))]
    assert all(report.find(id=link[1:]) for link in links)
    assert [h.get_text() for h in report.find_all("h1")] == ["A quick scenario of invented test data"]


def test_every_figure_has_alt_text_caption_and_reading(report):
    figures = report.find_all("figure")
    assert len(figures) >= 11
    for figure in figures:
        assert len(figure.img["alt"]) > 40 and figure.img["src"].startswith("data:image/svg+xml;base64,")
        assert base64.b64decode(figure.img["src"].split(",")[1]).startswith(b"<?xml")
        assert "measured, vLLM 0.0.test, HTTP, invented machine, 2 cores, n = " in figure.figcaption.get_text()
    assert len(report.select(".reading")) >= 9


def test_invalid_and_missing_cells_are_shown(report):
    assert "the client sent 12 ms late" in report.find(id="part-02").get_text()
    assert "1 of 10 not recorded" in report.find(id="part-03").get_text()


def test_code_is_folded_and_machinery_left_out(report):
    assert all(not d.has_attr("open") for d in report.select("details.code"))
    text = report.get_text()
    assert "open_study(scenario)" in text and 'scenario = "cpu"' not in text
    assert "http" not in [s.get("src", "") for s in report.find_all("script")]


def test_figures_are_written_for_the_scenario(quick_build):
    figures = {p.name for p in (quick_build.root / "figures/quick").iterdir()}
    names = {"coverage", "throughput-max-batch-size", "throughput-max-num-tokens", "throughput-grid",
             "ttft-max-batch-size", "ttft-max-num-tokens", "tpot-max-batch-size", "tpot-max-num-tokens", "tpot-grid",
             "tpot-spread", "running-batch-max-batch-size", "running-batch-max-num-tokens",
             "timeline-prefill-heavy", "timeline-decode-heavy", "limit-tpot"}
    assert figures == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}


def test_figures_repeat_byte_for_byte_when_executed_again(quick_build):
    folder = quick_build.root / "figures/quick"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for path in folder.glob("tpot-*"):
        path.unlink()
    done = quick_build.report("execute", "04", "--scenario", "quick")
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_index_links_the_report(quick_build):
    page = BeautifulSoup((quick_build.root / "build/index.html").read_text(), "html.parser")
    row = page.select_one("tbody tr")
    assert row.a["href"] == "quick/report.html"
    assert (quick_build.root / "build" / row.a["href"]).exists()
    assert [td.get_text() for td in row.find_all("td")[-3:]] == ["86", "1", "3"]
    assert "invented machine, 2 cores" in row.get_text()


def test_the_front_page_leads_with_the_verdicts(quick_build):
    page = BeautifulSoup((quick_build.root / "build/index.html").read_text(), "html.parser")
    counts = {a.get_text(" ", strip=True).split(" ", 1)[1]: int(a.b.get_text()) for a in page.select(".counts a")}
    assert sum(counts.values()) == 50 and counts["inconsistent as printed"] >= 14
    rows = page.select(".claims tbody tr")
    assert len(rows) == 50 and all(r.select_one(".verdict") and r.details for r in rows)
    assert [r["id"] for r in rows] == [f"claim-{n}" for n in range(1, 51)]
    surprises = page.select(".surprises li")
    assert 2 <= len(surprises) <= 3
    for card in surprises:
        claim = card.select_one("a[href^='#claim-']")["href"][1:]
        assert page.find(id=claim) and "times off" in card.get_text()
    for link in page.select(".claims a, .surprises a"):
        address, _, anchor = link["href"].partition("#")
        target = quick_build.root / "build" / address if address else quick_build.root / "build/index.html"
        assert f'id="{anchor}"' in target.read_text()
    order = [page.get_text().index(t) for t in ("The most surprising", "Reports", "Claim by claim")]
    assert order == sorted(order)


def test_claims_of_a_scenario_follow_its_cells(report):
    rows = {r["id"]: r for r in report.select("#part-09 .claims tbody tr")}
    assert len(rows) == 50
    assert rows["claim-19"].select_one(".verdict").get_text() == "not reproduced"
    assert "Measured on test_machine" in rows["claim-19"].get_text()
    assert rows["claim-31"].select_one(".verdict").get_text() == "inconsistent as printed"
    for link in report.select("#part-09 .claims a"):
        assert report.find(id=link["href"][1:])
    assert "No sweep of quick asks this." in report.find(id="part-07").get_text()


def test_links_to_figures_that_are_not_there_are_left_out():
    page = '<figure id="figure-a"></figure>x <a href="#figure-a">figure</a> y <a href="#figure-b">figure</a>'
    assert render.without_dead_links(page) == '<figure id="figure-a"></figure>x <a href="#figure-a">figure</a> y'


TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = (
    "[...document.querySelectorAll('.scroll')].filter(t => t.scrollWidth > t.clientWidth)"
    ".map(t => [...t.querySelectorAll('th')].map(h => h.textContent).join(' | '))"
)


@pytest.mark.browser
@pytest.mark.parametrize("page_file", ["quick/report.html", "index.html"])
def test_pages_open_offline_in_a_browser(quick_build, page_file):
    path = quick_build.root / "build" / page_file

    async def look() -> tuple[browser.Seen, dict]:
        async with browser.page() as page:
            await page.width(1400)
            await page.open(path)
            found = {"broken": await page.run(
                "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.alt)"),
                "images": await page.run("document.images.length"), "cut": await page.run(CUT)}
            for width in (1400, 800, 390):
                await page.width(width)
                found[width] = await page.run(TOO_WIDE)
            if "index" in page_file:
                await page.run("document.getElementById('verdict-inconsistent-as-printed').click()")
                await page.run("document.getElementById('source-S1').click()")
                left = "[...document.querySelectorAll('.claims tbody tr')].filter(r => r.offsetParent)"
                found["filtered"] = set(await page.run(f"{left}.map(r => r.className)"))
            if "report" in page_file:
                await page.run("document.getElementById('toggle-code').click()")
                found["closed"] = await page.run("document.querySelectorAll('details.code:not([open])').length")
                found["label"] = await page.run("document.getElementById('toggle-code').textContent")
            return page.seen, found

    seen, found = asyncio.run(look())
    assert seen.outside == [] and seen.errors == []
    assert found["broken"] == []
    assert [found[w] for w in (1400, 800, 390)] == [0, 0, 0], "the page is wider than the window"
    assert found["cut"] == [], "tables that a wide window cuts off"
    if "index" in page_file:
        assert found["filtered"] == {"inconsistent-as-printed S1"}
    if "report" in page_file:
        assert found["images"] >= 11 and found["closed"] == 0 and found["label"] == "Hide all code"


@pytest.mark.browser
def test_the_browser_check_sees_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="none.png"><img src="http://127.0.0.1:9/x.png"><script>console.error("x"); y()</script>')

    async def look() -> tuple[browser.Seen, int]:
        async with browser.page() as page:
            await page.open(bad)
            return page.seen, await page.run("[...document.images].filter(i => i.naturalWidth === 0).length")

    seen, broken = asyncio.run(look())
    assert broken == 2 and seen.outside == ["http://127.0.0.1:9/x.png"] and len(seen.errors) >= 3


def test_rates_of_a_sweep_in_short():
    assert setup.rates([math.inf]) == "all at once"
    assert setup.rates([math.inf, 0.5, 4]) == "all at once, 0.5, 4 req/s"
    assert setup.rates([1, 3, 5, 6, 7]) == "1 to 7 (5) req/s"


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (("mine", "later"), setup.ALL_AT_ONCE, "mine"),
        (("mine", "later"), ("latency",), "later"),
        (("throughput", "latency"), setup.ALL_AT_ONCE, "throughput"),
        (("mine", "latency"), ("latency",), "latency"),
        (("mine", "later"), ("token-budget",), None),
    ],
)
def test_sweeps_with_names_of_their_own_are_found_by_their_load(tmp_path, monkeypatch, names, asked, found):
    """A point without a limit that varies, and a closed loop, are no curve of either kind."""
    sweeps = [
        {"name": "a-point", "max_batch_size": 2},
        {"name": "a-loop", "max_batch_size": [1, 2], "arrival": {"kind": "closed", "concurrency": 2}},
        {"name": names[0], "max_batch_size": [1, 2, 4]},
        {"name": names[1], "max_num_tokens": [32, 64], "request_rate": 4},
        {"name": "another", "max_batch_size": [1, 2], "request_rate": 8},
    ]
    loaded = scenario.Scenario(name="x", path="x.yml", **GOOD | {"sweeps": sweeps})
    study = Study(loaded, plan.expand(loaded), Store(tmp_path))
    monkeypatch.setattr(Study, "ensure", Study.frame)
    expected = {c.id for c in study.cells(found)} if found else set()
    assert set(setup.cells_of(study, *asked)["cell"]) == expected

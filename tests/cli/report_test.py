"""`wyvern report`: what is in the page and in the other formats, and that a browser draws it."""

import json
import re
import shutil
import struct
import subprocess
import unittest
from html.parser import HTMLParser

from cache_test import CacheCase

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
# Elements that HTML closes by itself.
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements that are open, what they load from elsewhere, and the text of each script."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.scripts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


class Report(CacheCase):
    def fill(self):
        row = self.winner(0.8)
        row["samples_us"] = [80.0, 81.5, 79.5, 80.0, 95.0]
        row["default_samples_us"] = [100.0, 101.0, 99.0, 100.0, 118.0]
        self.row = row
        self.document("cache", "import", self.pack("a.jsonl", row, *self.measurements(row)))

    def page(self):
        self.document("report", "-o", self.path("report.html"))
        return (self.folder / "report.html").read_text()

    def data(self, text):
        page = Page()
        page.feed(text)
        page.close()
        self.assertEqual(page.open, [])
        self.assertEqual(page.loads, [])
        return json.loads(page.scripts[0])

    def test_what_is_in_it(self):
        self.fill()
        text = self.page()
        self.assertNotIn("<b>ended", text)  # a row's text is no element of the page
        data = self.data(text)
        (problem,) = data["problems"]
        self.assertEqual((problem["tuned_us"], problem["default_us"], problem["ratio"]),
                         (80.0, 100.0, 0.8))
        plan = self.row["plan"]
        self.assertEqual([step["template"] for step in problem["steps"]],
                         [step["template"] for step in plan])
        self.assertEqual([step["us"] for step in problem["steps"]],
                         [10.0 + i for i in range(len(plan))])
        # Each step could be 1 us faster by the config that has another BV.
        took = sum(10.0 + i for i in range(len(plan)))
        self.assertAlmostEqual(problem["regret"], took / (took - len(plan)) - 1)
        self.assertEqual(problem["samples_us"], self.row["samples_us"])
        self.assertTrue(problem["clocks_mhz"])
        self.assertEqual(data["statuses"], {"crashed": len(plan), "ok": 2 * len(plan)})
        self.assertEqual(len(data["failures"]), len(plan))
        self.assertEqual(data["devices"][0]["hosts"], ["node1"])
        self.assertEqual(data["errors"][0]["largest"], 1e-3)

    def test_floor(self):
        """That of the tuning, where the row has it."""
        row = self.winner(floor_us=12.5)
        self.document("cache", "import", self.pack("a.jsonl", row))
        self.assertEqual(self.data(self.page())["problems"][0]["floor_us"], 12.5)

    def test_clock_is_that_of_the_samples(self):
        """Where the winner has one; else what it was while the stages were measured."""
        row = self.winner(clocks_mhz=[1980.0, 1965.0, 1950.0])
        self.document("cache", "import", self.pack("a.jsonl", row, *self.measurements(row)))
        self.assertEqual(self.data(self.page())["problems"][0]["clocks_mhz"], row["clocks_mhz"])
        shown = self.document("cache", "show", self.document("cache", "list")["winners"][0]["id"])
        self.assertEqual(shown["clocks_mhz"], row["clocks_mhz"])

    @unittest.skipUnless(BROWSER, "no Chromium here (Debian's package: chromium)")
    def test_what_is_not_known_is_said(self):
        """A winner from a pack: there are no stages to draw, nor compile times."""
        self.document("cache", "import", self.pack("a.jsonl", self.winner()))
        self.page()
        shown = self.browse("--dump-dom", "--window-size=1200,4000").stdout
        for sentence in ("No row of a stage is left", "the clock was not watched",
                         "No tunable was measured", "No compiled kernel is in the cache"):
            self.assertIn(sentence, shown)
        self.assertNotIn('aria-label="Stages', shown)

    def test_empty_cache(self):
        data = self.data(self.page())
        self.assertEqual(data["problems"], [])

    def test_other_formats(self):
        self.fill()
        self.document("report", "-o", self.path("b.json"), "--format", "benchmark")
        document = json.loads((self.folder / "b.json").read_text())
        names = {b["name"] for b in document["benchmarks"]}
        self.assertEqual(len(names), 4)
        tuned = [b for b in document["benchmarks"] if b["name"].endswith("/tuned")]
        self.assertEqual([b["real_time"] for b in tuned], self.row["samples_us"])
        self.assertEqual([b["repetition_index"] for b in tuned], list(range(5)))
        self.document("report", "-o", self.path("t.json"), "--format", "trace")
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        stages = [e for e in events if e["ph"] == "X"]
        self.assertEqual(len(stages), len(self.row["plan"]))
        for before, after in zip(stages, stages[1:]):
            self.assertEqual(before["ts"] + before["dur"], after["ts"])

    def test_refusals(self):
        self.refuses("report", names=["-o", "missing"])
        self.refuses("report", "-o", "x", "--format", "pdf", names=["--format", "pdf", "trace"])

    def browse(self, *options):
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--disable-dev-shm-usage", f"--user-data-dir={self.path('profile')}",
                   "--virtual-time-budget=5000", *options, "file://" + self.path("report.html")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    @unittest.skipUnless(BROWSER, "no Chromium here (Debian's package: chromium)")
    def test_a_browser_draws_it(self):
        self.fill()
        text = self.page()
        done = self.browse("--enable-logging=stderr", "--dump-dom", "--window-size=1200,8000")
        self.assertTrue('data-ready="yes"' in done.stdout, done.stderr)
        self.assertNotIn("Uncaught", done.stderr)
        for title in ("Provenance", "Problems", "Stages", "Samples", "Tunables", "Errors",
                      "Compile times", "Failures"):
            self.assertRegex(done.stdout, f"<h[23]>{title}</h")
        canvases = re.findall(r"<canvas[^>]*>", done.stdout)
        if self.document("report", "-o", self.path("again.html"))["charts"]:
            self.assertGreaterEqual(len(canvases), 4)
            # Chart.js gives what it has drawn a size.
            self.assertTrue(all("height=" in canvas for canvas in canvases), canvases)
        else:
            self.assertEqual(canvases, [])
            self.assertIn("libjs-chart.js", done.stdout)
        shown = done.stdout.replace("<wbr>", "")
        self.assertTrue("its worker &lt;b&gt;ended&lt;/b&gt;" in shown)
        self.assertLess(len(text), 2_000_000)

    def overflow(self, html, elements, width):
        """How many pixels the content of those elements is wider than they are, in a window's width."""
        probe = ("<script>document.body.dataset.overflow = Math.max(...Array.from(document.querySelectorAll("
                 f"'{elements}'), one => one.scrollWidth - one.clientWidth));</script></body>")
        (self.folder / "report.html").write_text(html.replace("</body>", probe))
        done = self.browse("--dump-dom", f"--window-size={width},3000")
        (overflow,) = re.findall(r'data-overflow="(-?\d+)"', done.stdout)
        return int(overflow)

    @unittest.skipUnless(BROWSER, "no Chromium here (Debian's package: chromium)")
    def test_it_fits_a_screen(self):
        """No table is cut off, or scrolls, in a window of 1280 pixels."""
        self.fill()
        self.assertEqual(self.overflow(self.page(), "html, .wrap", 1280), 0)

    @unittest.skipUnless(BROWSER, "no Chromium here (Debian's package: chromium)")
    def test_it_fits_a_phone(self):
        """A picture of a narrow window: nothing is wider than it. (Tables scroll in their place.)"""
        self.fill()
        self.assertEqual(self.overflow(self.page(), "html", 500), 0)
        self.browse(f"--screenshot={self.path('phone.png')}", "--window-size=500,3000")
        width, height = struct.unpack(">II", (self.folder / "phone.png").read_bytes()[16:24])
        self.assertEqual((width, height), (500, 3000))


if __name__ == "__main__":
    unittest.main()

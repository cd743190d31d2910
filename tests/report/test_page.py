"""Reports as a page: what users wrote is escaped, nothing is loaded, and a browser shows it in light and in dark."""

import dataclasses
import os
import re
import shutil
import subprocess
import tomllib
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cgpass.report.report import html
from cgpass.report.text import NOTHING, findings, headline
from tests.report.samples import sample

ROOT = Path(__file__).parents[2]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


class Parsed(HTMLParser):
    """Tags, attributes and text of a page; fails where tags don't match."""

    VOID = ("meta", "link", "br")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], "", []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(report):
    return Parsed(html(report))


def test_it_says_what_the_text_says():
    report = sample()
    found = " ".join(page(report).text.split())
    for each in findings(report):
        for words in (each.where, each.what, each.fix, each.code):
            assert " ".join(words.split()) in found
    for words in (headline(report), "NVIDIA H200", "2026-01-01 12:00", "train.py", "Model.forward"):
        assert words in found
    for words in (
        "96.0 MiB",
        "3.0 MiB",
        "0.750 ms",
        "moved from 0x7f00 to 0x7f80",
        "model.py:38 in forward",
    ):
        assert words in found


def test_what_users_wrote_is_text():
    nasty = '<script>alert("x")</script><img src=x onerror=y>\'"&'
    found = page(sample(nasty))
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<script>alert") > 8


def test_it_needs_nothing_else():
    text = html(sample())
    assert not re.findall(r"https?://|@import|url\(|<script|src=", text)
    found = page(sample())
    assert [value for name, value in found.attributes if name == "href"] == ["data:,"]


def test_bars_are_as_long_as_times_or_operators():
    report = sample()
    widths = [value for name, value in page(report).attributes if name == "style"]
    assert widths == ["flex-grow:0.75", "flex-grow:0.25"]
    graph = report.graphs[0]
    parts = tuple(dataclasses.replace(part, device_ms=None) for part in graph.partitions)
    report = sample(graphs=(dataclasses.replace(graph, partitions=parts),))
    widths = [value for name, value in page(report).attributes if name == "style"]
    assert widths == ["flex-grow:40", "flex-grow:3"]


def test_a_report_of_nothing():
    empty = {"graphs": (), "graph_breaks": (), "left_to_eager": (), "graphs_ms": None}
    assert NOTHING in page(sample(**empty)).text


def test_the_template_is_part_of_the_package():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "cgpass" in packaged["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert (ROOT / "cgpass" / "report" / "page.html.j2").exists()


def first_pixel(png):
    """Red, green and blue of the upper left corner; there no filter of PNG changes anything."""
    chunks, at = b"", 8
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        chunks += png[at + 8 : at + 8 + size] * (kind == b"IDAT")
        at += 12 + size
    return tuple(zlib.decompress(chunks)[1:4])


@pytest.mark.parametrize(("scheme", "is_dark"), [(0, True), (1, False)], ids=["dark", "light"])
def test_a_browser_shows_it(tmp_path, scheme, is_dark):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    sample("<i>").save(tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=900,1200",
            f"--screenshot={shot}",
            (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert shot.exists(), done.stderr
    assert "CONSOLE" not in done.stderr
    assert (max(first_pixel(shot.read_bytes())) < 64) is is_dark
    assert is_dark or min(first_pixel(shot.read_bytes())) > 192

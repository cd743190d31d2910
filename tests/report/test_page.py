"""Reports as a page: what users wrote is escaped, nothing is loaded, and a browser shows it in light and in dark."""

import html.parser
import os
import re
import shutil
import subprocess
import zlib

import pytest

from tests.report.samples import sample

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


class Parsed(html.parser.HTMLParser):
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
    return Parsed(report_html(report))


def report_html(report):
    from cgpass.report.page import html as made

    return made(report)


def test_it_says_what_the_text_says():
    found = page(sample()).text
    for words in ("NVIDIA H200", "model.py:38 in forward", "66.7%", "96.0 MiB", "3.0 MiB", "0.750"):
        assert words in found
    for words in (
        "host_read",
        "scale = x.max().item()",
        "keep the value on the device",
        "(2 times)",
    ):
        assert words in found
    assert "moved from 0x7f00 to 0x7f80" in found
    assert "It ends at a graph break" in found
    assert "it uses several devices" in found


def test_what_users_wrote_is_text():
    nasty = '<script>alert("x")</script><img src=x onerror=y>\'"&'
    found = page(sample(nasty))
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<script>alert") > 8


def test_it_needs_nothing_else():
    text = report_html(sample())
    assert not re.findall(r"https?://|@import|url\(|<script|src=", text)
    found = page(sample())
    assert [value for name, value in found.attributes if name == "href"] == ["data:,"]


def test_without_times_the_timeline_shows_operators():
    data = sample().to_dict()
    for graph in data["functions"][0]["graphs"]:
        graph["ms"] = graph["plain_ms"] = None
        for part in graph["partitions"]:
            part["ms"] = part["plain_ms"] = None
    from cgpass import Report

    found = page(Report.from_dict(data))
    widths = [value for name, value in found.attributes if name == "style"]
    assert widths == ["width:100.00%", "flex-grow:40.0000", "flex-grow:3.0000"]


def test_its_words_are_plain():
    text = page(sample()).text
    assert "CUDA graph coverage" in text
    assert "runs without a graph" in text
    assert "plainly" not in text


def test_a_report_of_nothing():
    assert "Nothing here was compiled by cgpass" in page(sample(functions=())).text


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

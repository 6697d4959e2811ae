"""Runs under other versions: what is asked of pip, and how a report is read."""

from __future__ import annotations

from pathlib import Path

from tests.packaging import versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good" />
<testcase classname="tests.a" name="bad"><failure message="assert 1 == 2&#10;more" /></testcase>
<testcase classname="tests.b" name="broken"><error message="failed on setup" /></testcase>
<testcase classname="tests.b" name="left"><skipped message="no such class" /></testcase>
</testsuite></testsuites>"""


def test_the_oldest_are_the_lower_bounds() -> None:
    asked = versions.supported_ranges()
    assert [each.partition(">=")[0] for each in asked] == ["torch", "transformers"]
    assert versions.oldest("torch>=2.11") == "torch==2.11"
    assert versions.oldest("transformers>=5.17,<6") == "transformers==5.17"


def test_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    counts, remarks = versions.read_report(path)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert remarks == (
        "failed tests.a::bad: assert 1 == 2",
        "failed tests.b::broken: failed on setup",
        "skipped tests.b::left: no such class",
    )

"""Traces are read event by event, up to the first damage."""

from __future__ import annotations

import gzip
import json

import pytest

from lucidrl.report import trace_reading
from lucidrl.report.trace_reading import DamagedTrace, events_of, header_of
from tests.unit.report.traces import span, write_operators, write_spans

SPANS = [span(f"phase {number} é ]}},", number, number + 1, pid=7) for number in range(20)]


@pytest.fixture(params=[1, 7, 1 << 20])
def chunk(request, monkeypatch):
    """Characters that are read at once: events lie across the borders of chunks."""
    monkeypatch.setattr(trace_reading, "_CHUNK_CHARS", request.param)


def test_both_forms_of_a_trace_give_header_and_events(tmp_path, chunk):
    spans, operators = (write(tmp_path, "policy-0", 7, *SPANS) for write in (write_spans, write_operators))
    assert [event for event in events_of(spans) if event["ph"] == "X"] == SPANS
    assert list(events_of(operators)) == SPANS
    for path in (spans, operators):
        header = header_of(path)
        assert (header.process, header.host, header.pid) == ("policy-0", "node-a", 7)


def test_a_compressed_trace_is_read_too(tmp_path):
    path = write_operators(tmp_path, "policy-0", 7, *SPANS)
    packed = tmp_path / "policy-0.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(events_of(packed)) == SPANS
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DamagedTrace):
        list(events_of(packed))


@pytest.mark.parametrize("write", [write_spans, write_operators])
def test_a_file_that_is_cut_off_gives_the_events_before(tmp_path, chunk, write):
    path = write(tmp_path, "policy-0", 7, *SPANS)
    text = path.read_text()
    path.write_text(text[: text.index("phase 9")])
    events = (event for event in events_of(path) if event["ph"] == "X")
    assert [next(events) for _ in range(9)] == SPANS[:9]
    with pytest.raises(DamagedTrace, match="it ends in the middle"):
        next(events)


WRONG = {
    "": "it ends too early",
    "[": "it ends too early",
    "{}": "it has no events",
    '{"traceEvents": {}}': "it has '{}",
    "[1, 2]": "it has a int in the place of an event",
    "[{,}]": "it ends in the middle of an event, or has text that is not JSON",
    "\0\0\0": "where '[' should be",
}


@pytest.mark.parametrize("text", WRONG)
def test_other_content_is_refused_with_a_reason(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(DamagedTrace) as caught:
        list(events_of(path))
    assert WRONG[text] in str(caught.value)
    with pytest.raises(DamagedTrace):
        header_of(path)


def test_a_trace_of_another_program_has_no_header(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": SPANS}))
    with pytest.raises(DamagedTrace, match="no readable metadata 'lucidrl'"):
        header_of(path)

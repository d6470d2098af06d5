"""Several replicas' metrics in one text, read back by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.replicas.merged import labelled, merge_metrics

ONE = """# HELP a_total Things.
# TYPE a_total counter
a_total 1
# HELP b Levels.
# TYPE b histogram
b_bucket{le="1",x="y z"} 2
b_bucket{le="+Inf"} 3
b_sum 4.5
b_count 3
"""


def test_a_label_is_added() -> None:
    assert labelled("a 1", "2") == 'a{replica="2"} 1'
    assert labelled('a{b="c d"} 1', "2") == 'a{replica="2",b="c d"} 1'
    assert labelled("a{} 1", "2") == 'a{replica="2"} 1'


def test_families_stay_together() -> None:
    more = "# HELP c More.\n# TYPE c gauge\nc 7\n"
    text = merge_metrics({"1": ONE, "2": ONE + more})
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(found) == {"a", "b", "c"}
    assert [(s.labels["replica"], s.value) for s in found["a"].samples] == [("1", 1), ("2", 1)]
    assert len(found["b"].samples) == 8
    assert text.count("# TYPE b histogram") == 1
    assert [s.labels["replica"] for s in found["c"].samples] == ["2"]


def test_nothing() -> None:
    assert merge_metrics({}) == ""

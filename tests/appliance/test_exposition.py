import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.exposition import PageError, merge
from tests.appliance.fake_engine import METRICS

OWN = "# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n"


def names(page):
    return [family.name for family in text_string_to_metric_families(page)]


def test_families_of_the_python_process_are_left_out_and_the_rest_is_not_renamed():
    page = merge(OWN, METRICS)
    assert names(page) == [
        "a",
        "vllm:num_requests_running",
        "vllm:iteration_tokens_total",
        "vllm:e2e_request_latency_seconds",
    ]
    assert 'vllm:e2e_request_latency_seconds_sum{engine="0"} 1.5e-03\n' in page


def test_a_family_appears_once():
    twice = "# TYPE b gauge\nb 1\n# TYPE c gauge\nc 1\n# TYPE b gauge\nb 2\n"
    page = merge(OWN, OWN + twice)
    assert names(page) == ["a", "b", "c"]
    assert page.count("a_total 1.0") == 1
    assert "b 2" not in page


def test_label_values_may_hold_anything():
    line = r'x{a="}",b="\"\\ # HELP y",c=""} +Inf 1700000000000'
    assert merge(OWN, line + "\n").endswith(line + "\n")


@pytest.mark.parametrize("page", ["<html>", "x{a=1} 2", "x 1 2 3", "x", 'x{a="} 1'])
def test_what_is_no_prometheus_text_is_refused(page):
    with pytest.raises(PageError, match="not a line"):
        merge(OWN, page)

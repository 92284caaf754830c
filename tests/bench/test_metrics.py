"""Recorded /metrics of vLLM and SGLang: differences of counters, and gauges under their own definitions."""

import pytest

from app.bench.measure import Served
from app.bench.metrics import Reading, of_gauges, read_metrics
from app.bench.settings import acceptance

# As vLLM 0.32 prints them: one label set per engine, `_total` behind a counter, `_created` beside it.
VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m{{}}\\"x\\""}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 100.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {draft_tokens}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 16.0
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
process_start_time_seconds 1.76e+09
"""

# As SGLang's SchedulerMetricsCollector and TokenizerMetricsCollector register them: gauges of the last
# decode_log_interval steps, per tensor-parallel rank; no counter of drafts.
SGLANG = """
# HELP sglang:spec_accept_length Mean acceptance length (accepted drafts + bonus token per forward).
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {length}
# HELP sglang:spec_accept_rate Speculative acceptance rate (`accepted drafts / proposed drafts` in batch).
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {rate}
{more}
sglang:generation_tokens_total{{model_name="m"}} 1234.0
sglang:cached_tokens_total{{cache_source="device",model_name="m"}} 8.0
sglang:cached_tokens_total{{cache_source="host",model_name="m"}} 4.0
"""
CHAIN = 'sglang:spec_num_steps{model_name="m"} 3.0\nsglang:spec_num_draft_tokens{model_name="m"} 4.0'


def vllm(drafts: int, accepted: tuple[int, int], generated: int = 0) -> Reading:
    first, second = accepted
    return read_metrics(VLLM.format(drafts=drafts, draft_tokens=2 * drafts, accepted=first + second, first=first,
                                    second=second, generated=generated))  # fmt: skip


def sglang(length: float, rate: float, more: str = CHAIN) -> Reading:
    return read_metrics(SGLANG.format(length=length, rate=rate, more=more))


def test_vllm_counts_by_difference() -> None:
    """F75: 200 drafts lie between the two readings, whatever was counted before."""
    found = vllm(250, (160, 60), 900).since(vllm(50, (40, 20), 300))
    assert (found.engine, found.drafts, found.draft_tokens, found.accepted) == ("vLLM", 200, 400, 160)
    assert found.accepted_per_position == (120, 40) and found.generated == 600 and found.prefix_hits == 0
    served = Served([[1]], [1.0], 1, drafts=found.drafts, draft_tokens=found.draft_tokens, accepted=found.accepted,
                    accepted_per_position=list(found.accepted_per_position))  # fmt: skip
    told = acceptance(served, 2)
    assert told["acceptance_length"] == pytest.approx(1 + 160 / 200)
    assert told["acceptance_rate"] == pytest.approx(160 / 400)
    assert told["acceptance_per_position"] == [0.6, 0.2]


def test_engines_of_one_server_are_added() -> None:
    assert vllm(250, (1, 1)).drafts == 350


def test_the_first_reading_may_have_no_positions() -> None:
    """Label sets appear with the first draft."""
    assert vllm(200, (120, 40)).since(read_metrics("vllm:generation_tokens_total 0.0")).accepted_per_position == (
        120,
        40,
    )


def test_a_server_that_was_started_anew_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="started anew"):
        vllm(10, (1, 1)).since(vllm(50, (40, 20)))


def test_sglang_length_is_ours_and_its_rate_stays_its_own() -> None:
    """Length: (accepted + bonus) / verification steps, as ours. An older rate counts the root among the verified."""
    found = of_gauges([sglang(2.2, 0.55), sglang(2.8, 0.7), sglang(2.5, 0.625)])
    assert found is not None
    assert found["acceptance_length"] == pytest.approx(2.5)
    assert found["acceptance_rate"] == pytest.approx(1.5 / 3) and found["num_draft_tokens"] == 3
    assert found["sglang"]["sglang:spec_accept_rate"] == pytest.approx(0.625)
    assert found["readings"] == 3
    told = acceptance(Served([[1]], [1.0], 1, gauges=found), 5)
    assert told["acceptance_length"] == pytest.approx(2.5) and told["num_draft_tokens"] == 3
    assert told["acceptance_rate"] == pytest.approx(0.5)
    assert told["acceptance_per_position"] == [] and told["drafts"] == 0


def test_an_older_sglang_does_not_tell_k() -> None:
    found = of_gauges([sglang(2.5, 0.625, "")])
    assert found is not None and found["num_draft_tokens"] is None and found["acceptance_rate"] is None
    assert acceptance(Served([[1]], [1.0], 1, gauges=found), 5)["acceptance_rate"] == pytest.approx(1.5 / 5)  # as set


def test_readings_before_the_first_draft_do_not_count() -> None:
    found = of_gauges([sglang(0.0, 0.0), sglang(2.5, 0.625)])
    assert found is not None and found["acceptance_length"] == 2.5 and found["readings"] == 1
    assert of_gauges([sglang(0.0, 0.0)]) is None and of_gauges([vllm(5, (1, 1))]) is None


def test_its_tokens_and_cache_hits_are_counters() -> None:
    reading = sglang(2.5, 0.6)
    assert (reading.engine, reading.generated, reading.prefix_hits) == ("SGLang", 1234, 12)
    assert read_metrics("go_goroutines 3\nnothing") == Reading()

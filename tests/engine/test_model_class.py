"""Targets that vLLM cannot capture are refused by name before anything is loaded (F73)."""

from __future__ import annotations

import pytest

from app.engine.model_class import check_model_class, gives_auxiliary_states, passes_over_pipeline, vllm_source
from app.errors import UserError


def test_f73_a_class_without_auxiliary_states_is_refused_by_name() -> None:
    source = vllm_source()
    assert source is not None
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForConditionalGeneration"):
        assert gives_auxiliary_states(source, name) is True
    for name in ("GptOssForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"):
        assert gives_auxiliary_states(source, name) is True
        check_model_class(name, {})
    for name in ("Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "Qwen2MoeForCausalLM"):
        with pytest.raises(UserError, match=f"{name} gives no auxiliary hidden states"):
            check_model_class(name, {})
    assert gives_auxiliary_states(source, "NobodyKnowsForCausalLM") is None
    check_model_class("NobodyKnowsForCausalLM", {})  # vLLM itself decides


def test_pipeline_parallelism_is_refused_with_the_reason() -> None:
    source = vllm_source()
    assert source is not None
    assert passes_over_pipeline(source, "Qwen3ForCausalLM")
    assert not passes_over_pipeline(source, "Qwen3MoeForCausalLM")
    check_model_class("Qwen3MoeForCausalLM", {"pipeline_parallel_size": 1})
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM does not pass its auxiliary states"):
        check_model_class("Qwen3MoeForCausalLM", {"pipeline_parallel_size": 2})
    with pytest.raises(UserError, match="draftmill does not collect the auxiliary states that Qwen3ForCausalLM passes"):
        check_model_class("Qwen3ForCausalLM", {"pipeline_parallel_size": 2})


def test_without_vllm_the_check_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("app.engine.model_class.vllm_source", lambda: None)
    with caplog.at_level("WARNING"):
        check_model_class("Gemma2ForCausalLM", {})
    assert "vLLM is not installed here" in caplog.text

"""Real vLLM loads and serves what lint passes, and computes with it what the trainer computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.checkpoint import DraftConfig, Verifier, read_checkpoint, write_checkpoint
from app.lint.command import lint
from app.target import TargetInfo, inspect_target, load_target_head
from app.train.draft import Eagle3Draft, inverse_frequencies
from app.train.reference import reference_logits
from tests import serve_draft
from tests.drafts import draft_config, edit_config, random_tensors
from tests.runs import ROOT

pytest.importorskip("vllm")

K, TOKENS, PROMPT_LENGTHS = 3, 24, (9, 5, 17)
AUX_LAYER_IDS = (1, 3, 6)  # not what the engine would guess: a key nobody reads would show


def serve(target: Path, draft: Path, out: Path) -> dict[str, Any]:
    """What vLLM made of the draft; records and weights go to file `out`."""
    arguments = [target, draft, K, TOKENS, out, *PROMPT_LENGTHS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve_draft", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.mark.engine
@pytest.mark.parametrize(
    "flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual")], ids=lambda f: "+".join(f)
)
@torch.no_grad()
def test_vllm_serves_the_full_form(flags: tuple[str, ...], tiny_llama3rope: Path, tmp_path: Path) -> None:
    """F48, F50, F55, F67, F68, F69, F71 in the engine itself, with every key of the full form written.

    One draft has the scaled rotary embedding, head_dim != hidden / heads, a reduced vocabulary and layer ids
    that are not the default. The engine must read them all: its logits are those of the trainer's definition. The same
    with the norm flags on: those of EAGLE-3.1, and the two older ones.
    """
    info = inspect_target(str(tiny_llama3rope))
    config = draft_config(info, aux_layer_ids=AUX_LAYER_IDS, **dict.fromkeys(flags, True))
    embed = load_target_head(info).embed_tokens
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), embed, info)
    written = json.loads((folder / "config.json").read_text())
    assert {"rope_parameters", "rope_scaling", "eagle_config", "norm_before_residual"} <= written.keys()

    assert lint(str(folder), str(tiny_llama3rope)).differences == []
    check_served(tiny_llama3rope, folder, tmp_path / "records.pt")


@pytest.mark.engine
def test_vllm_serves_the_speculators_layout(tiny_llama3rope: Path, tmp_path: Path) -> None:
    """Every key is read from its place there: the norms, the layer ids, the rotary embedding, the sizes."""
    info = inspect_target(str(tiny_llama3rope))
    config = draft_config(info, aux_layer_ids=AUX_LAYER_IDS, fc_norm=True, norm_output=True)
    embed = load_target_head(info).embed_tokens
    verifier = Verifier(str(tiny_llama3rope), info.architecture, K)
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), embed, info, verifier)
    assert "transformer_layer_config" in json.loads((folder / "config.json").read_text())
    assert lint(str(folder), str(tiny_llama3rope)).differences == []
    check_served(tiny_llama3rope, folder, tmp_path / "records.pt")


@pytest.mark.engine
def test_vllm_serves_a_foreign_form_that_lint_passes(tiny: Path, tmp_path: Path) -> None:
    """Pickled weights, another layer name, no t2d, no embedding, one rotary form, keys left to their defaults."""
    info = inspect_target(str(tiny))
    config = draft_config(info, aux_layer_ids=AUX_LAYER_IDS)
    tensors = random_tensors(config)
    folder = write_checkpoint(tmp_path / "draft", config, tensors, None, info)
    (folder / "model.safetensors").unlink()
    del tensors["t2d"]
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    torch.save({n.replace("midlayer.", "layers.0."): t for n, t in halves.items()}, folder / "pytorch_model.bin")
    absent = ("target_hidden_size", "norm_before_residual", "rope_parameters", "eagle_config", "use_cache")
    edit_config(folder, lambda c: [c.pop(name) for name in absent])
    edit_config(folder, lambda c: c.update(torch_dtype="float16", architectures=["LlamaForCausalLM"]))
    report = lint(str(folder), str(tiny), engine="vLLM")
    assert report.passes and report.differences  # warnings
    assert not lint(str(folder), str(tiny)).passes  # SGLang drops layers.0. and knows no such class
    check_served(tiny, folder, tmp_path / "records.pt")


def check_served(target: Path, folder: Path, out: Path) -> None:
    """vLLM serves `folder` with everything it was written with, and its logits are the trainer's."""
    info = inspect_target(str(target))
    result = serve(target, folder, out)
    assert result["layers"] == result["captured"] == list(AUX_LAYER_IDS)
    assert result["head_dim"] == info.head_dim
    assert result["shared_embedding"]  # the engine found the embedding equal to the target's, or none
    assert [len(tokens) for tokens in result["tokens"]] == [TOKENS] * len(PROMPT_LENGTHS)
    assert result["num_draft_tokens"] == K * result["num_drafts"] > 0

    seen = torch.load(out, weights_only=True)
    config, tensors = read_checkpoint(folder)
    for name, ours in (("lm_head", "lm_head.weight"), ("norm", "norm.weight"), ("d2t", "d2t")):
        assert torch.equal(seen[name][: len(tensors[ours])].to(tensors[ours].dtype), tensors[ours]), name
    tensors.setdefault("embed_tokens.weight", load_target_head(info).embed_tokens)
    check_rotary(config, seen["cos_sin"])
    check_first_round(info, config, tensors, seen)


def check_rotary(config: DraftConfig, cos_sin: Tensor) -> None:
    """The engine's table [positions, head_dim] is made of the trainer's frequencies (F67)."""
    frequencies, scale = inverse_frequencies(config)
    angles = torch.arange(len(cos_sin)).float()[:, None] * frequencies  # [positions, head_dim/2]
    ours = torch.cat([angles.cos(), angles.sin()], -1) * scale
    assert torch.allclose(cos_sin.float(), ours, atol=1e-4)


def check_first_round(info: TargetInfo, config: DraftConfig, tensors: dict[str, Tensor], seen: dict[str, Any]) -> None:
    """States and logits of the first draft round, against Transformers and the trainer (F48, F68)."""
    from transformers import AutoModelForCausalLM

    rows = PROMPT_LENGTHS[0]  # P: the draft has one row per prompt token
    prompt = torch.tensor(serve_draft.prompt(rows))
    model = AutoModelForCausalLM.from_pretrained(info.model, dtype=torch.float32)
    states = model(prompt[None], output_hidden_states=True).hidden_states  # s_k [1, P, H]
    aux = torch.cat([states[k][0] for k in AUX_LAYER_IDS], -1)  # [P, 3H]
    assert torch.allclose(seen["aux"][:rows], aux, atol=1e-3)

    first = seen["calls"][0]
    assert torch.equal(first["input_ids"][: rows - 1], prompt[1:])  # row t reads x_{t+1}
    answer = [int(first["input_ids"][rows - 1])]  # the target's first token
    drafted = [first["logits"][rows - 1], *(call["logits"][0] for call in seen["calls"][1:])]  # K times [V]
    for step, call in enumerate(seen["calls"][1:], 1):
        answer.append(int(drafted[step - 1].argmax()))
        assert (int(call["input_ids"][0]), int(call["positions"][0])) == (answer[-1], rows - 1 + step)

    ids = torch.cat([prompt, torch.tensor([*answer, 0])])  # [P + K + 1]
    padded = torch.cat([aux, torch.zeros(len(ids) - 1 - rows, aux.shape[1])])  # later rows change nothing
    draft = Eagle3Draft(config)
    draft.load_exported(tensors)
    draft.embed_tokens.weight = draft.embed_tokens.weight.float()
    logits = reference_logits(draft, SimpleNamespace(token_ids=ids, aux=padded), K)  # [K, T-1, Vd]
    kept = draft.kept_ids
    outside = torch.ones(config.vocab_size, dtype=torch.bool)
    outside[kept] = False
    assert torch.allclose(first["logits"][:rows, kept], logits[0, :rows], atol=1e-3)  # every row of step 0
    for step in range(K):
        assert torch.allclose(drafted[step][kept], logits[step, rows - 1], atol=1e-3), f"unroll step {step}"
        assert bool(drafted[step][outside].isneginf().all())

"""``replace`` on mamba_ssm's own MambaLMHeadModel, with its slow path and with its kernels: needs
mamba-ssm and a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hugging_face import error as off
from operators import on
from packmamba import leakcheck
from packmamba.integrations.mamba_ssm import Mamba, replace
from packmamba.ops.mamba_ssm import _peer

LENGTHS = [19, 1, 23, 2, 38, 64, 63, 1, 65]
FAST = ("selective_scan_fn", "causal_conv1d_fn", "causal_conv1d_update", "selective_state_update")


@pytest.fixture(scope="module")
def theirs():
    """mamba_ssm's modules: the model, the layer's file, the state of generation, its reference
    scan.
    """
    try:
        reference = _peer("mamba_ssm", "ops.selective_scan_interface", "selective_scan_ref")
        from mamba_ssm.models import config_mamba, mixer_seq_simple
        from mamba_ssm.modules import mamba_simple
        from mamba_ssm.utils.generation import InferenceParams
    except (ValueError, ImportError) as error:
        pytest.skip(f"needs mamba-ssm: {error}")
    return config_mamba.MambaConfig, mixer_seq_simple.MambaLMHeadModel, mamba_simple, InferenceParams, reference


@pytest.mark.parametrize(("device", "path"), [("cpu", "slow"), on("cuda", "slow"), on("cuda", "kernels")])
def test_a_replaced_model_packs_and_gives_the_same(theirs, device, path, monkeypatch):
    config, model_of, simple, inference, reference = theirs
    if path == "slow":  # plain PyTorch: the oracle
        for name in FAST:
            monkeypatch.setattr(simple, name, reference if name == "selective_scan_fn" else None)
    torch.manual_seed(0)
    fused = dict.fromkeys(("rms_norm", "fused_add_norm"), device == "cuda")
    real = model_of(config(d_model=64, n_layer=3, vocab_size=100, **fused), device=device)
    for layer in real.modules():
        if isinstance(layer, simple.Mamba):
            layer.use_fast_path = path == "kernels"
    ours = replace(copy.deepcopy(real))
    assert sum(isinstance(layer, Mamba) for layer in ours.modules()) == 3
    assert not any(isinstance(layer, simple.Mamba) for layer in ours.modules())
    assert list(ours.state_dict()) == list(real.state_dict())
    fresh = replace(model_of(real.config, device=device))
    fresh.load_state_dict(real.state_dict())
    real.load_state_dict(fresh.state_dict())

    tokens = torch.randint(100, (1, sum(LENGTHS)), device=device)
    seq_idx = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int().to(device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        packed = ours(tokens, seq_idx=seq_idx).logits
        alone = torch.cat([real(piece).logits for piece in tokens.split(LENGTHS, 1)], 1)
        assert off(packed, alone) < 1e-5
        assert off(fresh(tokens, seq_idx=seq_idx).logits, alone) < 1e-5
        assert off(ours(tokens).logits, real(tokens).logits) < 1e-5
        assert off(real(tokens).logits, alone) > 0.01  # what packing it without us does
        weights = torch.randn_like(alone)
        (packed * weights).sum().backward()
        (alone * weights).sum().backward()
        for (name, own), (_, other) in zip(ours.named_parameters(), real.named_parameters()):
            assert off(own.grad, other.grad) < 1e-4, name
        said = [list(steps(model.eval(), inference, tokens[:, :19])) for model in (ours, real)]
        assert off(*map(torch.stack, said)) < 1e-5
        assert leakcheck(ours, "seq_idx").ok
        assert not leakcheck(real, "position_ids").ok


@torch.no_grad()
def steps(model, inference, ids):
    """Logits of twelve greedy steps with mamba_ssm's states of inference."""
    state = inference(max_seqlen=99, max_batch_size=1)
    for _ in range(12):
        logits = model(ids, inference_params=state, num_last_tokens=1).logits[:, -1]
        state.seqlen_offset += ids.shape[1]
        ids = logits.argmax(-1, keepdim=True)
        yield logits

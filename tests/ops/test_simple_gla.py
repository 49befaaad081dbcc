"""Linear attention with a decay a head: its equations in float64, states, padding, and errors by
name.
"""

import pytest
import torch

from models import LAYOUT
from packmamba import ops


def loop(q, k, v, g, layout, states):
    """Compute ``h = exp(g) h + v k``, ``o = h q / sqrt(K)`` token by token."""
    outputs, finals = torch.zeros_like(v), []
    for s, start in enumerate(layout.starts.tolist()):
        h = states[s]
        for slot in range(start, int(layout.ends[s])):
            row, at = divmod(slot, v.shape[1])
            h = torch.exp(g[row, at].clamp(max=0))[:, None, None] * h + v[row, at, :, :, None] * k[row, at, :, None]
            outputs[row, at] = (h @ q[row, at, :, :, None])[..., 0] / q.shape[-1] ** 0.5
        finals.append(h)
    return outputs, torch.stack(finals)


@pytest.mark.parametrize("kind", ["gated", "slow", "reset", "constant"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_it_is_its_equations_and_never_reads_padding(dtype, tolerance, kind):
    torch.manual_seed(0)
    real = (LAYOUT.documents >= 0)[..., None]
    shape = (*LAYOUT.shape, 2)
    q, k, v = (torch.randn(*shape, size).to(dtype) for size in (4, 4, 3))
    gates = (-0.5 - torch.rand(shape)).index_fill(1, torch.tensor([2]), 0.1)  # above 0 counts as 0
    reset = gates.index_fill(1, torch.tensor([1]), -torch.inf)
    of_kind = {"gated": gates, "slow": 1e-3 * gates, "reset": reset}
    g = gates[0, 0] * torch.tensor([1, -1]) if kind == "constant" else of_kind[kind].where(real, torch.nan)
    v = v.where(real[..., None], torch.nan)
    inputs = [q, k, v, g.to(torch.promote_types(dtype, torch.float32)), torch.randn(LAYOUT.num_documents, 2, 3, 4)]
    inputs[4] = inputs[4].to(inputs[3].dtype)
    results = []
    keys = {"layout": LAYOUT, "return_final_state": True}
    for wide in (False, True):
        *qkv, decay, states = (each.double() if wide else each for each in inputs)
        leaves = [each.clone().requires_grad_() for each in (*qkv, decay, states)]
        *qkv, decay, states = leaves
        if wide:
            output, final = loop(*qkv, decay.expand(shape), LAYOUT, states)
        else:
            output, final = ops.simple_gla_pack(*qkv, decay, initial_state=states, **keys)
            assert output.dtype == dtype and not output.where(real[..., None], 0).isnan().any()
        loss = output.double().where(real[..., None], 0).square().sum() + final.double().square().sum()
        results.append([output, final, *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert (ours.double() - expected.nan_to_num(0)).norm() <= tolerance * expected.nan_to_num(0).norm() > 0


def test_a_wrong_argument_is_named():
    q = torch.randn(1, 3, 2, 4)
    with pytest.raises(ValueError, match="^g: expected"):
        ops.simple_gla_pack(q, q, q, torch.zeros(3))
    with pytest.raises(ValueError, match="^k: expected shape"):
        ops.simple_gla_pack(q, q[..., :2], q, torch.zeros(2))

"""Small models with random weights, random tokens and states, and gradients by name."""

import functools

import pytest
import torch
import torch.nn.functional as F

from operators import relative_error, slow_unless
from packmamba import MambaLM, PackedMamba, PackedMamba2, PackedMamba3, SequenceLayout

# Rows with different splits, padding, one-token documents, continuations, a row of nothing.
LAYOUT = SequenceLayout.from_lengths([[5, 1, 6], [9, 2], [], [1]], row_length=14, offsets=[[7, 0, 0], [0, 0], [], [3]])
VOCAB = 23
CONFIGS = {
    "published": {},
    "everything": {"bias": True, "tie_embeddings": False, "dt_rank": 3, "expand": 3},
    "mamba2": {"mixer": "mamba2", "headdim": 8, "ngroups": 2, "bias": True, "d_conv": 3},
    "mamba3": {"mixer": "mamba3", "headdim": 4, "ngroups": 2, "rope_fraction": 1.0, "d_intermediate": 24},
    "narrow": {"d_conv": 2, "d_state": 1, "conv_bias": False, "n_layer": 1, "expand": 1},
}
LAYERS = {
    "mamba1": PackedMamba,
    "mamba2": functools.partial(PackedMamba2, headdim=8),
    "mamba3": functools.partial(PackedMamba3, headdim=8),
}
EXACT = 1e-13  # float64; orders of sums leave about 2e-15


def build(seed=0, dtype=torch.float64, **config):
    torch.manual_seed(seed)
    model = MambaLM(**{"vocab_size": VOCAB, "d_model": 8, "n_layer": 2, "d_state": 4} | config)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones that could hide a mistake
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
one_mixer_slowly = pytest.mark.parametrize("mixer", slow_unless({"mamba1"}, LAYERS))


def random_tokens(layout=LAYOUT, seed=1):
    return torch.randint(1, VOCAB, layout.shape, generator=torch.Generator().manual_seed(seed))


def random_states(model, documents, seed=2):
    generator = torch.Generator().manual_seed(seed)

    def draw(like):
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype).requires_grad_()

    return [tuple(map(draw, pair)) for pair in model.start_states(documents)]


def flat(states):
    return [state for pair in states for state in pair]


def slots(layout, s):
    return slice(int(layout.starts[s]), int(layout.ends[s]))


def summed_loss(logits, tokens, layout):
    """Over the targets inside documents; a document's last token has none."""
    documents = layout.documents
    has_target = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    return F.cross_entropy(logits[:, :-1][has_target], tokens[:, 1:][has_target], reduction="sum")


def losses_alone(model, document):
    """Return each target's loss in a document by itself."""
    tokens = torch.tensor(document.tolist())
    return F.cross_entropy(model(tokens[None])[0, :-1], tokens[1:], reduction="none").detach().numpy()


def gradients(loss, model, states=()):
    """By name; of parameters, then of states."""
    named = dict(model.named_parameters()) | {f"states {i}": state for i, state in enumerate(flat(states))}
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), **options)))


def error(result, expected):
    return relative_error(result.detach(), expected.detach().double())


def assert_close(results, expected, tolerance=EXACT):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert error(results[name], value) <= tolerance, name

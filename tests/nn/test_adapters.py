"""PEFT's adapters on MambaLM: each is trained, and merged weights give the adapted model's logits."""

import copy

import pytest
import torch

from models import LAYOUT, VOCAB, error, random_tokens
from packmamba import MambaLM
from packmamba.training import PackedLitModule

HEADS = {"d_state": 8, "headdim": 8}
MIXERS = {
    "mamba1": ({}, ["in_proj", "x_proj", "dt_proj", "out_proj"]),
    "mamba2": (HEADS | {"mixer": "mamba2"}, ["in_proj", "out_proj"]),
    "mamba3": (HEADS | {"mixer": "mamba3", "d_intermediate": 8}, ["in_proj", "out_proj", "fc1", "fc2"]),
}
every_projection = pytest.mark.parametrize(
    ("mixer", "target"), [(mixer, target) for mixer, (_, targets) in MIXERS.items() for target in targets]
)


def model_of(mixer):
    torch.manual_seed(0)
    return MambaLM(vocab_size=VOCAB, d_model=16, n_layer=2, **MIXERS[mixer][0]).double()


def adapt(mixer, targets=None):
    peft = pytest.importorskip("peft")
    model = model_of(mixer)
    config = peft.LoraConfig(r=2, target_modules=targets or MIXERS[mixer][1], init_lora_weights=False)
    return copy.deepcopy(model), peft.get_peft_model(model, config)


@pytest.mark.extras
@every_projection
def test_an_adapter_counts_and_merges(mixer, target):
    model, adapted = adapt(mixer, [target])
    tokens = random_tokens()
    logits = adapted(tokens, layout=LAYOUT)
    assert error(logits, model(tokens, layout=LAYOUT)) > 1e-5, "it is called"
    assert error(logits, adapted.merge_and_unload()(tokens, layout=LAYOUT)) < 1e-9


@pytest.mark.extras
@pytest.mark.parametrize("mixer", MIXERS)
def test_adapters_alone_are_trained_and_documents_stay_apart(mixer):
    _, adapted = adapt(mixer)
    module = PackedLitModule(model=adapted, lr=1e-2)
    optimizer = module.configure_optimizers()
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    tokens = random_tokens()
    logits = adapted(tokens, layout=LAYOUT)
    real = LAYOUT.seq_idx >= 0
    logits[real].square().sum().backward()
    optimizer.step()
    changed = {name for name, parameter in adapted.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    first = slice(int(LAYOUT.starts[0]), int(LAYOUT.ends[0]))
    others = tokens.flatten().clone()
    others[int(LAYOUT.ends[0]) :] = 3
    again = adapted(others.view_as(tokens), layout=LAYOUT).flatten(0, 1)[first]
    assert torch.equal(again, adapted(tokens, layout=LAYOUT).flatten(0, 1)[first])


class Doubled(torch.nn.Linear):
    """A projection with a forward of its own, as loralib's."""

    def forward(self, x):
        return 2 * super().forward(x)


def double(linear):
    """Put ``Doubled`` in a projection's place."""
    linear.__class__ = Doubled


def double_by_hook(linear):
    linear.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("adapter", [double, double_by_hook])
@every_projection
def test_a_projection_that_is_more_than_its_weight_is_called(mixer, target, adapter):
    model = model_of(mixer)
    adapted = copy.deepcopy(model)
    for module, other in zip(model.modules(), adapted.modules()):
        if isinstance(getattr(module, target, None), torch.nn.Linear):
            adapter(getattr(other, target))
            with torch.no_grad():
                for parameter in getattr(module, target).parameters():
                    parameter *= 2
    tokens = random_tokens()
    logits = adapted(tokens, layout=LAYOUT)
    assert error(logits, model(tokens, layout=LAYOUT)) < 1e-12
    unadapted = model_of(mixer)
    unadapted.load_state_dict(adapted.state_dict())
    assert error(logits, unadapted(tokens, layout=LAYOUT)) > 1e-5

"""Generated tokens are those of the whole text computed again at each step, and of transformers."""

import pytest
import torch

from hugging_face import take_own_path
from operators import DEVICES
from packmamba import MambaLM
from packmamba.evaluation import generate

PROMPTS = [[1, 2, 3], [4], list(range(20)), [7] * 90]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return MambaLM(vocab_size=40, d_model=24, n_layer=2).double()


def greedily(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_takes_the_most_likely_token_of_the_whole_text(model):
    expected = [greedily(model, prompt, 12) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=12, max_slots=64) == expected
    assert generate(model, PROMPTS[::-1], max_new_tokens=12) == expected[::-1]
    assert generate(model, PROMPTS, max_new_tokens=12, temperature=1e-320) == expected
    assert generate(model, []) == []


def test_stops(model):
    whole = generate(model, PROMPTS, max_new_tokens=12)
    stop = whole[2][4]
    expected = [text[: text.index(stop)] if stop in text else text for text in whole]
    assert generate(model, PROMPTS, max_new_tokens=12, stop_token=stop) == expected
    ended = generate(model, PROMPTS, max_new_tokens=12, stop=lambda tokens: tokens[-1] == stop)
    assert ended == [text[: text.index(stop) + 1] if stop in text else text for text in whole]


def test_draws_depend_on_the_seed_and_the_prompt_s_index(model):
    first = generate(model, PROMPTS, max_new_tokens=8, temperature=1.0, seed=3)
    assert first == generate(model, PROMPTS, max_new_tokens=8, temperature=1.0, seed=3)
    assert first != generate(model, PROMPTS, max_new_tokens=8, temperature=1.0, seed=4)
    assert first[:2] == generate(model, PROMPTS[:2], max_new_tokens=8, temperature=1.0, seed=3)


def test_draws_follow_the_probabilities(model):
    with torch.no_grad():
        p = model(torch.tensor([[5, 6]]))[0, -1].softmax(-1)
    drawn = torch.tensor(generate(model, [[5, 6]] * 2000, max_new_tokens=1, temperature=1.0, max_slots=2048)).flatten()
    assert (torch.bincount(drawn, minlength=40) / 2000 - p).abs().max() < 5 * (0.25 / 2000) ** 0.5
    top = torch.tensor(generate(model, [[5, 6]] * 300, max_new_tokens=1, temperature=1.0, top_p=0.2)).unique()
    ordered = p.argsort(descending=True)
    count = int((p[ordered].cumsum(0) < 0.2).sum()) + 1
    assert set(top.tolist()) <= set(ordered[:count].tolist()) and len(top) > 1
    assert generate(model, [[5, 6]], max_new_tokens=3, temperature=1.0, top_p=1e-9) == [greedily(model, [5, 6], 3)]


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_equals_transformers(tmp_path, device, monkeypatch):
    """On a GPU transformers uses the peers' kernels where they are."""
    transformers = pytest.importorskip("transformers")
    if device == "cpu":
        take_own_path(monkeypatch)
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=16)
    theirs = transformers.MambaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    theirs.to(device)
    ours = MambaLM.from_pretrained(tmp_path).to(device)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    for prompt, new in zip(PROMPTS, generate(ours, PROMPTS, max_new_tokens=16)):
        assert new == theirs.generate(torch.tensor([prompt], device=device), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([[1], []], {}, r"prompts\[1\]"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_p": 0.9}, "top_p"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens"),
    ],
)
def test_errors_name_the_argument(model, prompts, options, match):
    with pytest.raises(ValueError, match=match):
        generate(model, prompts, **options)

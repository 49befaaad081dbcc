"""Published checkpoints: Hugging Face's own model as the reference, state-spaces' folder by hand."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import hugging_face
from hugging_face import plain_torch  # noqa: F401
from models import LAYOUT, build, error, gradients, random_tokens, slots, summed_loss
from packmamba import MambaLM

transformers = pytest.importorskip("transformers")

HUGGING_FACE = hugging_face.CONFIGS | {"epsilon": {"layer_norm_epsilon": 0.1}}
HUGGING_FACE |= {"mamba2": {"family": "Mamba2"}, "one group": {"family": "Mamba2", "use_bias": True, "n_groups": 1}}
OPTIONS = {"tie_embeddings": False, "d_conv": 2, "bias": True, "d_state": 3, "dt_rank": 2}
MAMBA2 = {"mixer": "mamba2", "headdim": 8, "ngroups": 2, "bias": True, "dt_limit": [0.02, 0.03], "norm_eps": 1e-6}
FILES = ["safetensors", "safetensors in shards", "bin", "bin in shards"]


def save_hugging_face(model, folder, files):
    model.save_pretrained(folder, max_shard_size="5KB" if "shards" in files else "1GB")
    if not files.startswith("bin"):
        return
    # Releases before 4.35 wrote these; the present one only reads them.
    for path in sorted(folder.glob("*.safetensors")):
        name = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(load_file(path), folder / name)
        path.unlink()
    for path in folder.glob("model.safetensors.index.json"):
        index = path.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(index)
        path.unlink()


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("config", HUGGING_FACE.values(), ids=HUGGING_FACE.keys())
def test_logits_and_gradients_are_hugging_face_s(tmp_path, config, files):
    theirs, tokens = hugging_face.build(**{"family": "Mamba"} | config), random_tokens()
    save_hugging_face(theirs, tmp_path, files)
    weights = list(tmp_path.glob("*.bin" if "bin" in files else "*.safetensors"))
    assert (len(weights) > 1) == ("shards" in files)
    ours = MambaLM.from_pretrained(tmp_path)
    logits = ours(tokens, layout=LAYOUT)
    expected_loss = 0.0
    for s in range(LAYOUT.num_documents):
        document = tokens.flatten()[slots(LAYOUT, s)][None]
        alone = theirs(document).logits
        assert torch.allclose(logits.flatten(0, 1)[slots(LAYOUT, s)], alone[0], rtol=0, atol=1e-4)
        assert error(logits.flatten(0, 1)[slots(LAYOUT, s)], alone[0]) < 1e-5
        expected_loss = expected_loss + F.cross_entropy(alone[0, :-1], document[0, 1:], reduction="sum")
    results, expected = gradients(summed_loss(logits, tokens, LAYOUT), ours), gradients(expected_loss, theirs)
    expected = {name.replace("embeddings", "embedding"): value for name, value in expected.items()}
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any() and error(results[name], value) < 5e-5, name


def test_a_hub_s_name_is_downloaded(tmp_path, monkeypatch):
    """The second format of weights only where the first is not there, at the revision that was
    asked for.
    """
    hugging_face.build("Mamba").save_pretrained(tmp_path / "first")
    # its time_step_limit is infinite
    (theirs := hugging_face.build("Mamba2")).save_pretrained(tmp_path / "second")
    ours, tokens = MambaLM.from_pretrained(tmp_path / "second").eval(), torch.arange(9)[None]
    assert torch.allclose(ours(tokens), theirs.eval()(tokens).logits, atol=1e-4)
    save_state_spaces(tmp_path, state_spaces_weights())
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns[1]))
        return str(tmp_path / "first" if name == "someone/mamba-hf" else tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    MambaLM.from_pretrained("someone/mamba-hf")
    assert MambaLM.from_pretrained("state-spaces/mamba-130m", revision="v1").config["d_model"] == 8
    first, second = "model*.safetensors*", "pytorch_model*.bin*"
    wanted = [("someone/mamba-hf", None, first), *(("state-spaces/mamba-130m", "v1", p) for p in (first, second))]
    assert asked == wanted
    for name in ("first/nothing", "nothing", "../some/where", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="^directory: expected a checkpoint's folder"):
            MambaLM.from_pretrained(name)
    assert asked == wanted


@pytest.mark.parametrize("installed", [True, False])
def test_a_name_that_cannot_be_downloaded(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not installed:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = "got 's/mamba' " if installed else "pip install huggingface_hub"
    with pytest.raises(FileNotFoundError, match=message) as caught:
        MambaLM.from_pretrained("s/mamba")
    assert "\n" not in str(caught.value)


# The keys of mamba-130m's config.json, and those that mamba-ssm 2 added.
STATE_SPACES = {"d_model": 8, "n_layer": 2, "vocab_size": 21, "ssm_cfg": {}, "pad_vocab_size_multiple": 8}
STATE_SPACES |= dict.fromkeys(("rms_norm", "residual_in_fp32", "fused_add_norm"), True)
ADDED = {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "tie_embeddings": True}


def save_state_spaces(folder, weights, **config):
    (folder / "config.json").write_text(json.dumps(STATE_SPACES | config))
    torch.save(weights, folder / "pytorch_model.bin")


def state_spaces_weights(dtype=torch.float32, **config):
    """Build MambaLMHeadModel.state_dict(), in its order: the tied head as well, the vocabulary
    padded to 24.
    """
    weights = build(dtype=dtype, vocab_size=24, **{"d_state": 16} | config).state_dict()
    assert list(weights)[0] == "backbone.embedding.weight" and list(weights)[-1] == "lm_head.weight"
    return dict(weights)


@pytest.mark.parametrize("added", [{}, ADDED], ids=["mamba-ssm 1", "mamba-ssm 2"])
def test_state_spaces_folder_with_a_padded_vocabulary(tmp_path, added):
    weights = state_spaces_weights(torch.float16)
    save_state_spaces(tmp_path, weights, **added)
    model = MambaLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.backbone.embedding.weight and model.config["vocab_size"] == 24
    wide = {name: value.float() for name, value in weights.items()}
    torch.testing.assert_close(dict(model.state_dict()), wide, rtol=0, atol=0)
    assert model(random_tokens()[:, :5] % 21).shape == (4, 5, 24)


@pytest.mark.parametrize(
    "config", [{}, OPTIONS, {"norm_epsilon": 0.01}, MAMBA2], ids=["published", "options", "ours alone", "mamba2"]
)
def test_a_saved_model_is_loaded_as_it_was(tmp_path, config):
    model, tokens = build(dtype=torch.float32, vocab_size=29, **config), random_tokens()
    model.save_pretrained(tmp_path / "new" / "folder")
    again = MambaLM.from_pretrained(tmp_path / "new" / "folder")
    assert again.config == model.config
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))
    published = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    only_ours = {"norm_epsilon"} if "norm_epsilon" in config else set()
    assert published.keys() == STATE_SPACES.keys() | {"tie_embeddings"} | only_ours, "mamba-ssm refuses other keys"


@pytest.mark.parametrize("mixer", [{}, {"mixer": "mamba2", "headdim": 8}], ids=["mamba1", "mamba2"])
def test_folders_that_say_whether_initial_states_are_learned(tmp_path, mixer):
    """Earlier versions wrote the key: false changes nothing, true is a weight that has no place any
    more.
    """
    model = build(dtype=torch.float32, **mixer)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    published = json.loads(path.read_text())
    published["ssm_cfg"]["learned_initial_state"] = False
    path.write_text(json.dumps(published))
    again = MambaLM.from_pretrained(tmp_path)
    assert again.config == model.config
    tokens = random_tokens()
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))
    weights = model.state_dict() | {"backbone.layers.0.mixer.initial_state": torch.zeros(2)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="mixer.initial_state': expected no such weight"):
        MambaLM.from_pretrained(tmp_path)


A_LOG = "backbone.layers.1.mixer.A_log"


def config(**changes):
    return lambda folder: save_state_spaces(folder, state_spaces_weights(), **changes)


def weights(change):
    def apply(folder):
        given = torch.load(folder / "pytorch_model.bin")
        change(given)
        torch.save(given, folder / "pytorch_model.bin")

    return apply


REFUSALS = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "bad JSON": (lambda folder: (folder / "config.json").write_text('{"d_model": 8,'), "config.json"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json: expected keys"),
    "Mamba-4": (config(ssm_cfg={"layer": "Mamba4"}), "ssm_cfg.layer: expected 'Mamba1' or 'Mamba2'.*, got 'Mamba4'"),
    "attention": (config(attn_layer_idx=[1]), "attn_layer_idx"),
    "unknown option": (config(ssm_cfg={"headdim": 64}), "ssm_cfg: unknown keys headdim"),
    "no weights": (lambda folder: (folder / "pytorch_model.bin").unlink(), "model.safetensors"),
    "LFS pointer": (lambda folder: (folder / "pytorch_model.bin").write_text("version"), "file of weights"),
    "missing tensor": (weights(lambda given: given.pop(A_LOG)), f"{A_LOG}': expected shape .*, got none"),
    "unknown tensor": (weights(lambda given: given.update(extra=torch.ones(1))), "extra': expected no such weight"),
    "wrong shape": (weights(lambda given: given.update({A_LOG: given[A_LOG][:, :3]})), A_LOG),
    "another head": (weights(lambda given: given.update({"lm_head.weight": given["lm_head.weight"] + 1})), "head"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_errors_name_the_file_and_the_key(tmp_path, name):
    save_state_spaces(tmp_path, state_spaces_weights())
    spoil, message = REFUSALS[name]
    spoil(tmp_path)
    with pytest.raises(FileNotFoundError if name.startswith("no ") else ValueError, match=message):
        MambaLM.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("config", [{}, MAMBA2], ids=["mamba1", "mamba2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_transformers_loads_what_is_saved_in_its_format(tmp_path, tied, dtype, config):
    sizes = {"vocab_size": 50, "d_model": 16, "d_state": 8, "expand": 3, "norm_epsilon": 1e-6}
    model = build(dtype=torch.float32, tie_embeddings=tied, **sizes, **config)
    model.to(dtype).save_pretrained(tmp_path, format="huggingface")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == dtype
    ours = MambaLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), model.state_dict().values()))
    # In the other format, over these files.
    MambaLM(vocab_size=50, d_model=8, n_layer=1).save_pretrained(tmp_path)
    assert MambaLM.from_pretrained(tmp_path).config["d_model"] == 8
    tokens = torch.randint(50, (2, 30))
    with torch.no_grad():
        expected = theirs.float()(tokens).logits
        for own in (ours, model):
            torch.testing.assert_close(own.float()(tokens), expected, rtol=1e-4, atol=1e-4)


def test_what_hugging_face_s_format_cannot_hold_is_refused(tmp_path):
    for keys, name in (({"mixer": "mamba2", "D_has_hdim": True}, "D_has_hdim"), ({"mixer": "mamba3"}, "mixer")):
        model = MambaLM(vocab_size=50, d_model=8, n_layer=1, headdim=8, **keys)
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            model.save_pretrained(tmp_path / "new", format="huggingface")
        assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="^format: "):
        model.save_pretrained(tmp_path, format="onnx")


def test_mamba_ssm_gets_no_key_that_it_does_not_know(tmp_path):
    MambaLM(vocab_size=50, d_model=32, n_layer=1, mixer="mamba2", headdim=16, norm_eps=1e-5).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ssm_cfg"] == {"layer": "Mamba2", "headdim": 16}


def test_a_tied_head_that_was_replaced_is_not_saved(tmp_path):
    model = MambaLM(vocab_size=50, d_model=8, n_layer=1)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(50, 8))
    for format in ("state_spaces", "huggingface"):
        with pytest.raises(ValueError, match="^lm_head.weight: expected the embedding's"):
            model.save_pretrained(tmp_path, format)
    assert not any(tmp_path.iterdir())

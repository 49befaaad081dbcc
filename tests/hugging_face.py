"""Small Hugging Face models, what they give document by document, and their own path where the
peers' kernels are installed.
"""

import copy
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from operators import slow_unless

MAMBA1, MAMBA2 = ("Mamba", "FalconMamba", "Jamba", "Zamba"), ("Mamba2",)
HYBRIDS2 = ("Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH", "Zamba2")
# or a short convolution
DELTA = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid", "KimiLinear", "Lfm2", "Lfm2Moe")
FAMILIES = MAMBA1 + MAMBA2 + HYBRIDS2 + DELTA
# a pure Mamba; attention beside Mamba-2; beside the gated delta rule
OF_EACH_KIND = ("Mamba", "Bamba", "Qwen3Next")
every_family = pytest.mark.parametrize("family", FAMILIES)
# For long tests: ``make test`` runs one family of each kind, ``make test-slow`` the others.
every_family_slowly = pytest.mark.parametrize("family", slow_unless(OF_EACH_KIND, FAMILIES))
HYBRID = {  # most hybrids' keys of what CONFIGS names
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "time_step_rank": "mamba_dt_rank",
    "expand": "mamba_expand",
}
KEYS = {  # where they are others
    "NemotronH": {"state_size": "ssm_state_size"},
    "Zamba2": HYBRID | {"use_bias": "add_bias_linear", "use_conv_bias": "use_conv_bias"},
}
LIMITS = {"time_step_limit": (0.01, 0.2)}  # that some steps pass
OWN = {  # what a family has besides
    "Mamba2": {"n_groups": 2, "chunk_size": 4} | LIMITS,
    "Bamba": {"attn_layer_indices": [1], "mamba_n_groups": 2, "mamba_chunk_size": 4} | LIMITS,
    "GraniteMoeHybrid": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_chunk_size": 4, "num_local_experts": 2,
        "shared_intermediate_size": 12, "embedding_multiplier": 2.0, "residual_multiplier": 0.7,
        "position_embedding_type": "rope",
    },
    "FalconH1": {
        "mamba_n_groups": 2, "mamba_chunk_size": 4, "mamba_d_ssm": None, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
        "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.3, "key_multiplier": 0.7, "mlp_multipliers": [0.9, 1.1],
    },
    "NemotronH": {
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "moe"], "n_groups": 2, "chunk_size": 4, "head_dim": 8,
        "n_routed_experts": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 12, "time_step_min": 0.3,
    },
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_ngroups": 2,
        "chunk_size": 4, "use_shared_attention_adapter": True, "adapter_rank": 3, "use_mem_rope": True,
        "time_step_min": 0.3,
    },
}  # fmt: skip
CONFIGS = {
    "published": {},
    "biases": {"use_bias": True, "use_conv_bias": False},
    "untied": {"tie_word_embeddings": False},
    "odd sizes": {"hidden_size": 20, "expand": 3, "state_size": 3, "conv_kernel": 3, "time_step_rank": 5},
}
HEAD = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
OWN_DELTA = {
    "Qwen3Next": HEAD | {"shared_expert_intermediate_size": 12},
    "Qwen3_5": HEAD,
    "Qwen3_5Moe": HEAD | {"shared_expert_intermediate_size": 12},
    "OlmoHybrid": HEAD | {"linear_num_key_heads": 4},
    "KimiLinear": {
        "linear_num_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "initializer_range": 0.2,
    },
    "Lfm2": {"head_dim": 8, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {"head_dim": 8, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip
VOCAB = 40
LENGTHS = [9, 4, 1, 7, 12, 3, 8, 2]
ROWS = [([5, 1, 8], 0, 0), ([3, 2, 1], 3, 5), ([14], 0, 0), ([], 14, 0), ([4], 10, 0), ([9], 0, 5)]


def random_tokens(rows=ROWS, seed=1):
    return torch.randint(1, VOCAB, (len(rows), 14), generator=torch.Generator().manual_seed(seed))


def documents():
    """Return documents of LENGTHS, as data sets hold them."""
    tokens = torch.randint(1, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": part.tolist()} for part in tokens.split(LENGTHS)]


def settings_of(make, folder, **options):
    """Settings for a trainer of transformers or TRL, on a CPU and quiet."""
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    settings |= {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 0.01}
    settings |= {"bf16": False, "gradient_checkpointing": False}
    return make(str(folder), **settings | options)


def modeling(family):
    name = getattr(importlib.import_module("transformers"), f"{family}Config").model_type
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def take_own_path(monkeypatch):
    """Unwrap transformers' functions where the peers' kernels are installed, which would get
    tensors of a CPU.
    """
    for family in FAMILIES:
        module = modeling(family)
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                monkeypatch.setattr(module, name, inspect.unwrap(function))


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    take_own_path(monkeypatch)


@pytest.fixture
def wide(monkeypatch, plain_torch):
    """float64 all the way: transformers rounds to float32 between, whatever the weights are."""
    real_float, real_to = torch.Tensor.float, torch.Tensor.to

    def to(tensor, *args, **kwargs):
        rounds = args == (torch.float32,) or kwargs == {"dtype": torch.float32}
        return tensor if rounds and tensor.dtype == torch.float64 else real_to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else real_float(t))
    monkeypatch.setattr(torch.Tensor, "to", to)


def delta_config(family, config):
    """Return a gated delta hybrid's keys of what ``build`` is given."""
    size, experts = config.pop("state_size"), config.pop("num_experts", 2)
    config = {key: value for key, value in config.items() if key not in ("expand", "use_conv_bias", "time_step_rank")}
    kernel = "conv_L_cache" if family.startswith("Lfm2") else "linear_conv_kernel_dim"
    config[kernel] = config.pop("conv_kernel", 4)
    config["attention_bias"] = config.pop("use_bias", False)
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"layer_types": ["linear_attention", "full_attention"]}
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if family == "KimiLinear":
        sparse = "sparse" if experts > 1 else "dense"
        config |= {"linear_head_dim": size, "num_local_experts": 2, "mlp_layer_types": ["dense", sparse]}
    else:
        config |= {"linear_key_head_dim": size, "linear_value_head_dim": size + 2}
    if family != "Qwen3_5Moe":
        config["intermediate_size"] = 24
    if family == "Lfm2Moe":
        config |= {"num_dense_layers": 3 - experts, "num_experts": experts}
    if family.startswith("Qwen3"):
        config["num_experts"] = experts * (family == "Qwen3_5Moe" or experts > 1)
    # Every expert of every token: fewer, and a token's bits move with the number of tokens that
    # share its expert.
    return config | {"moe_intermediate_size": 12, "num_experts_per_tok": experts} | OWN_DELTA[family]


def build(family, dtype=torch.float32, seed=0, **config):
    import transformers

    torch.manual_seed(seed)
    config = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | config
    inner = config["hidden_size"] * config.get("expand", 2)
    if family in DELTA:
        config = delta_config(family, config)
    dense = config.pop("num_experts", 2) == 1 if family not in DELTA else False
    if family not in MAMBA1:
        config.pop("time_step_rank", None)
        norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": False} if config.get("use_bias") else {}
        rope = {"position_embedding_type": None} if config.get("use_bias") else {}
    if family not in ("Mamba", "FalconMamba", "Mamba2", *DELTA):
        config = {KEYS.get(family, HYBRID).get(key, key): value for key, value in config.items()}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    config = OWN.get(family, {}) | config
    if family == "Jamba":
        config |= {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2 - dense}
    if family == "Zamba":
        config |= {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]}
        config |= {"attention_head_dim": config["hidden_size"] // 2}
    if family == "Mamba2":
        config |= {"head_dim": inner // 4, "num_heads": 4}
    if family in ("Bamba", "GraniteMoeHybrid", "FalconH1"):
        config |= {"mamba_n_heads": 4, "head_dim": 8} | (norm if family == "FalconH1" else {})
    if family == "GraniteMoeHybrid":
        config |= {"num_local_experts": 0 if dense else 2} | rope
    if family == "NemotronH":
        config |= {"mamba_num_heads": 4, "mamba_head_dim": inner // 4}
        config["layers_block_type"] = config["layers_block_type"][: 4 - dense]
        del config["num_hidden_layers"]
    if family == "Zamba2":
        config |= {"n_mamba_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4}
    text = "Text" if family.startswith("Qwen3_5") else ""
    made = getattr(transformers, f"{family}{text}Config")(**config)
    if family in DELTA:
        made._experts_implementation = "eager"  # the default takes no float64
    model = getattr(transformers, f"{family}ForCausalLM")(made).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def both(family, **options):
    """The model as it comes, and the same patched."""
    from packmamba.integrations.transformers import patch

    model = build(family, **options)
    return model, patch(copy.deepcopy(model))


def arguments(rows):
    """(attention_mask, position_ids, seq_idx) of ``ROWS``; the latter two hold nonsense at padding."""
    mask, position, idx = [], [], []
    for lengths, before, behind in rows:
        mask.append([0] * before + [1] * sum(lengths) + [0] * behind)
        position.append([7] * before + [t for n in lengths for t in range(n)] + [9] * behind)
        idx.append([1] * before + [s for s, n in enumerate(lengths) for _ in range(n)] + [0] * behind)
    return tuple(torch.tensor(rows) for rows in (mask, position, idx))


def places(rows):
    """(row, first slot, slot behind the last) of each document."""
    for b, (lengths, before, _) in enumerate(rows):
        start = before
        for length in lengths:
            yield b, start, start + length
            start += length


def alone(model, tokens, rows):
    """Return [(logits (1, n, vocab), place)] of each document by itself."""
    return [(model(tokens[b, a:e][None], use_cache=False).logits, (b, a, e)) for b, a, e in places(rows)]


def loss_and_gradients(model, documents, tokens, rows):
    """Return cross entropy inside documents, given the logits of each, summed, and every
    parameter's gradient.
    """
    pairs = [(logits[:-1].double(), tokens[b, a + 1 : e]) for logits, (b, a, e) in zip(documents, places(rows))]
    total = sum(F.cross_entropy(logits, targets, reduction="sum") for logits, targets in pairs if len(targets))
    model.zero_grad()
    total.backward()
    used = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return total.detach(), used


def error(result, expected):
    """||a - b|| / ||b||; absolute for what is zero."""
    expected = expected.detach().double()
    return float((result.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def check_same(packed, model, logits, tokens, rows, tolerance):
    """A patched model's logits and gradients against the original's, document by document."""
    expected = alone(model, tokens, rows)
    for single, (b, a, e) in expected:
        assert error(logits[b, a:e], single[0]) < tolerance
    loss, found = loss_and_gradients(packed, [logits[b, a:e] for b, a, e in places(rows)], tokens, rows)
    wanted, gradients = loss_and_gradients(model, [single[0] for single, _ in expected], tokens, rows)
    assert abs(loss - wanted) < tolerance * wanted and found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # two float32 results; norms cancel most of x_proj's
        assert error(found[name], gradient) < 10 * tolerance, name


def refused(packed, **arguments):
    """Return a model's error for arguments that it refuses."""
    tokens = torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError)) as caught:
        packed(**{"input_ids": tokens} | arguments)
    return str(caught.value)

"""Gated delta hybrids on flash-linear-attention's kernels, which need a GPU; a Hopper needs Triton
3.7.1.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("fla.ops")

import hugging_face as hf  # noqa: E402
from packmamba import leakcheck  # noqa: E402
from packmamba.data.tokenizer import write_tokenizer  # noqa: E402
from packmamba.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("family", hf.DELTA[:5])]
# Chunks have 64 tokens.
LENGTHS = [70, 1, 130, 64, 63, 65]
SIZES = {"hidden_size": 64, "state_size": 32}


@pytest.fixture(autouse=True)
def products_of_float32(monkeypatch, tmp_path):
    """As fla's own tests: in TF32 a decay's gradient was off by 0.03 of its norm."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    # A kernel's file there does not say how it multiplies.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_packed_is_the_original_document_by_document(family):
    model, packed = (m.cuda() for m in hf.both(family, **SIZES))
    rows, tokens = [(LENGTHS, 0, 0)], torch.randint(1, hf.VOCAB, (1, sum(LENGTHS))).cuda()
    logits = packed(tokens, position_ids=hf.arguments(rows)[1].cuda()).logits
    hf.check_same(packed, model, logits, tokens, rows, 3e-3)
    assert leakcheck(packed, "position_ids+seq_idx+cu_seq_lens_q", lengths=LENGTHS[:4]).ok


def test_a_step_of_trl(family, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    write_tokenizer(tmp_path, "bytes", None, "</s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, pad_token="</s>")
    documents = [{"input_ids": torch.randint(1, 250, (n,)).tolist()} for n in LENGTHS[2:]]
    losses = []
    for packing in (True, False):
        model = hf.build(family, vocab_size=300, **SIZES)
        model = patch(model, require_boundaries=True) if packing else model
        options = {"packing": packing, "max_length": 256, "max_steps": 1, "bf16": True, "use_cpu": False}
        settings = hf.settings_of(trl.SFTConfig, tmp_path, router_aux_loss_coef=0.0, **options)
        dataset = datasets.Dataset.from_list(documents)
        trainer = trl.SFTTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert len(trainer.train_dataset) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-2)

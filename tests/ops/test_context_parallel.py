"""Ranks that share rows compute what one process does: outputs and gradients, document by document."""

import pytest
import torch
import torch.distributed

from packmamba import ContextParallel, MambaLM, SequenceLayout
from packmamba.data.batch import PackedBatch
from processes import run_ranks

# Rows of 24 slots in 2 or 4 shares: documents that fill several shares, end at an edge, begin just
# before one; padding.
LENGTHS = [[24], [5, 1, 17], [12, 6], [2, 3, 7, 4, 8]]
# None fills a share, so that ranks hand on what their last columns alone give.
SHORT = [[11, 5, 8], [3, 12, 9], [2, 3, 7, 4, 8], [8, 5, 2]]


def model_of(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return MambaLM(**{"vocab_size": 11, "d_model": 16, "n_layer": 2, "mixer": kind} | OPTIONS[kind]).to(dtype)


HEADS = {"d_state": 4, "headdim": 8, "ngroups": 2}
OPTIONS = {"mamba1": {"d_state": 4}, "mamba2": HEADS, "mamba3": HEADS}
OPTIONS["mimo"] = {"mixer": "mamba3", "is_mimo": True, "mimo_rank": 2} | HEADS


def batch_of(lengths=LENGTHS):
    layout = SequenceLayout.from_lengths(lengths, row_length=24)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, layout.shape, generator=generator)
    weights = torch.randn(*layout.shape, 11, generator=generator, dtype=torch.float64)
    return layout, tokens, weights * (layout.documents >= 0)[..., None]


def share_rows(backend, function, *arguments):
    """Call a function with the context of ranks that share rows, in one rank's process."""
    torch.distributed.init_process_group(backend)
    context = ContextParallel()
    if backend == "nccl":
        torch.cuda.set_device(context.rank)
    function(context, *arguments)
    torch.distributed.barrier()  # the first rank has the others' addresses
    torch.distributed.destroy_process_group()


def compare(context, mixer, device):
    """Compare a model on this rank's columns with the whole model: on a GPU in float32."""
    dtype, tolerance = (torch.float64, 1e-10) if device == "cpu" else (torch.float32, 1e-4)
    of_scan_and_conv = [(LENGTHS, LENGTHS), (SHORT, SHORT)]
    if mixer in ("mamba1", "mamba2"):
        of_scan_and_conv += [(LENGTHS, SHORT), (SHORT, LENGTHS)]
    for lengths, conv_lengths in of_scan_and_conv:
        layout, tokens, weights = batch_of(lengths)
        layout, tokens, weights = layout.to(device), tokens.to(device), weights.to(device)
        conv_layout = layout if conv_lengths is lengths else batch_of(conv_lengths)[0].to(device)
        weights = weights * (conv_layout.documents >= 0)[..., None]
        whole, shared = (model_of(mixer, dtype).to(device) for _ in range(2))
        expected = whole(tokens, layout=layout, conv_layout=conv_layout)
        (expected * weights).sum().backward()
        local = context.shard(layout).to(device)
        local_conv = local if conv_layout is layout else context.shard(conv_layout).to(device)
        logits = shared(context.columns(tokens), layout=local, conv_layout=local_conv)
        share = slice(context.rank * 24 // context.size, (context.rank + 1) * 24 // context.size)
        (logits * weights[:, share]).sum().backward()
        is_token = (local.documents >= 0) & (local_conv.documents >= 0)
        torch.testing.assert_close(logits[is_token], expected[:, share][is_token], rtol=tolerance, atol=tolerance)
        for parameter, one in zip(shared.parameters(), whole.parameters()):
            torch.distributed.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, one.grad, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mixer", OPTIONS)
def test_ranks_that_share_rows_compute_what_one_does(tmp_path, ranks, mixer):
    run_ranks(ranks, share_rows, "gloo", compare, mixer, "cpu", output=tmp_path / "output.txt")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mixer", OPTIONS)
def test_gpus_that_share_rows_compute_what_one_does(tmp_path, mixer):
    run_ranks(2, share_rows, "nccl", compare, mixer, "cuda", output=tmp_path / "output.txt")


def take_share(context):
    """Compare a batch's share on this rank with slices of the batch."""
    layout, tokens, weights = batch_of()
    batch = PackedBatch(tokens, tokens + 1, weights[..., 0] > 0, layout, source=torch.arange(layout.num_documents))
    share = batch.shard(context)
    columns = slice(context.rank * 8, (context.rank + 1) * 8)
    for name in ("tokens", "targets", "loss_mask"):
        assert torch.equal(getattr(share, name), getattr(batch, name)[:, columns])
    assert torch.equal(share.layout.position_indices, layout.position_indices[:, columns])
    assert torch.equal(context.columns(weights), weights[:, columns])
    is_token = share.layout.documents >= 0
    of_slots = share.source[share.layout.documents]
    assert torch.equal(of_slots[is_token], layout.documents[:, columns][is_token].long())


def test_a_batch_is_split_by_columns(tmp_path):
    run_ranks(3, share_rows, "gloo", take_share, output=tmp_path / "output.txt")


def poison(context):
    """Compare the bits of all documents but one, with numbers and with NaN in that one's."""
    layout, _, _ = batch_of()
    local = context.shard(layout)
    hidden = torch.randn(*layout.shape, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    width = context.width(24)
    share = slice(context.rank * width, (context.rank + 1) * width)
    for mixer in OPTIONS:
        block = model_of(mixer).backbone.layers[0].mixer
        # Documents that fill ranks, and one that begins just before an edge.
        for document in (0, 3, 4, 8):
            is_other = (layout.documents != document)[:, share] & (local.documents >= 0)
            seen = []
            for number in (1.0, torch.nan):
                poisoned = torch.where((layout.documents == document)[..., None], number, hidden)[:, share]
                poisoned = poisoned.clone().requires_grad_()
                y = block(poisoned, layout=local)
                y[is_other].sum().backward()
                seen += [y[is_other], poisoned.grad[is_other]]
            assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3]), (mixer, document)


def test_no_bit_of_another_document_crosses_ranks(tmp_path):
    run_ranks(4, share_rows, "gloo", poison, output=tmp_path / "output.txt")


def refuse(context):
    layout, tokens, _ = batch_of()
    local = context.shard(layout)
    model = model_of("mamba2")
    of_other_mixer = model_of("mamba1")
    of_other_mixer.backbone.layers[0].mixer.SHARES_ROWS = False
    # At the edge a document begins: nothing crosses, but in another layout.
    apart = context.shard(SequenceLayout.from_lengths([[12, 12]] * 4, row_length=24))
    states = model.start_states(local.num_documents)
    for call in (
        lambda: model(tokens[:, :12], layout=local, conv_layout=local.flow()),
        lambda: model(tokens[:, :12], layout=local, return_states=True),
        lambda: model(tokens[:, :12], layout=local, states=[(conv_state, None) for conv_state, _ in states]),
        lambda: of_other_mixer(tokens[:, :12], layout=local),
        lambda: of_other_mixer(tokens[:, :12], layout=apart, conv_layout=local),
        lambda: model_of("mamba3")(tokens[:, :12], layout=apart, conv_layout=local),
        lambda: model_of("mimo")(tokens[:, :12], layout=local, conv_layout=apart),
    ):
        with pytest.raises(ValueError, match="share"):
            call()
    # The reference's gradients have gradients, those of what ranks gather have none.
    block = MambaLM(11, 16, 1, backend="reference", d_state=4).double().backbone.layers[0].mixer
    hidden = torch.randn(*local.shape, 16, dtype=torch.float64, requires_grad=True)
    y = block(hidden, layout=local)
    (gradient,) = torch.autograd.grad(y.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_ranks_cannot_share_is_refused(tmp_path):
    run_ranks(2, share_rows, "gloo", refuse, output=tmp_path / "output.txt")

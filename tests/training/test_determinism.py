"""Test ``trainer.deterministic`` on a CPU: the same bits for any number of cores and loader workers."""

import torch

from packmamba.training.fit import fit
from runs import final_state, losses_of, tiny_config

# Matrices of such sizes are multiplied in other parts by four threads than by one.
KEYS = ["data.source=synthetic", "data.path=null", "data.num_documents=60", "data.distribution=short", "data.row_length=256",
        "data.tokens_per_step=1024", "data.max_tokens_per_batch=512", "model.d_model=64", "model.n_layer=1", "model.d_state=16",
        "trainer.max_steps=2", "trainer.leakcheck_every=null", "trainer.deterministic=true"]  # fmt: skip


def test_cores_and_workers_change_no_bit(tmp_path):
    found, before = [], torch.get_num_threads()
    for count, workers in ((1, 0), (4, 0), (3, 2)):
        torch.set_num_threads(count)
        config = tiny_config(tmp_path, *KEYS, f"data.num_workers={workers}", f"runs_dir={tmp_path}/{count}")
        record = fit(config, progress=False)
        assert torch.get_num_threads() == count, "what PyTorch would take is left as it was"
        found.append((losses_of(record), final_state(config)["state_dict"]))
    torch.set_num_threads(before)
    (losses, weights), *others = found
    for other, state in others:
        assert other == losses
        assert all(torch.equal(state[name], value) for name, value in weights.items())

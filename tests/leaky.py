"""A plugin with a mixer that leaks: each token reads the mean of its row so far, whatever documents
the row holds.
"""

import torch
from torch import nn

from packmamba.nn.mixers import MIXERS


class Leaky(nn.Module):
    NO_WEIGHT_DECAY = ()

    def __init__(self, d_model, d_state=4, recompute=False, backend=None):
        super().__init__()
        self.d_model = d_model
        self.projection = nn.Linear(d_model, d_model)

    def mix(self, normed, weight, conv_layout, ssm_layout, state, return_state):
        projected = self.projection(normed * weight)
        position = torch.arange(1, normed.shape[1] + 1, device=normed.device)
        return projected.cumsum(1) / position[:, None], () if return_state else None

    def start_state(self, documents):
        return ()

    def initialise_in_stack(self, n_layer):
        pass


MIXERS["leaky"] = Leaky

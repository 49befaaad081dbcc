"""The operators of Mamba blocks, packed: causal convolution, selective scan, Mamba-2's scan."""

from packmamba.ops.backends import BACKENDS, load
from packmamba.ops.conv import conv1d_pack
from packmamba.ops.inner import mamba_inner
from packmamba.ops.mamba2_inner import mamba2_inner
from packmamba.ops.scan import ssm_pack
from packmamba.ops.simple_gla import simple_gla_pack
from packmamba.ops.ssd import ssd_pack

load()  # also defines torch.ops.packmamba, which saved graphs name

__all__ = ["BACKENDS", "conv1d_pack", "mamba2_inner", "mamba_inner", "simple_gla_pack", "ssd_pack", "ssm_pack"]

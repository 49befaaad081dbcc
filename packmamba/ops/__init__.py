"""The two sequence-wise operators of a Mamba block, packed: a causal convolution and the selective scan."""

from packmamba.ops.conv1d_pack import conv1d_pack as conv1d_pack
from packmamba.ops.dispatch import BACKENDS as BACKENDS
from packmamba.ops.inner_pack import inner_pack as inner_pack
from packmamba.ops.ssm_pack import ssm_pack as ssm_pack

__all__ = ["BACKENDS", "conv1d_pack", "inner_pack", "ssm_pack"]

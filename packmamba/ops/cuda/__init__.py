"""The CUDA kernels behind the compiled operators: the schedule that a layout becomes, and the launch."""

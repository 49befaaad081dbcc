#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
STABLE_TORCH_LIBRARY(packmamba_cpu, m) { m.def("probe(Tensor x) -> ()"); }
static void probe(torch::stable::Tensor x) {}
STABLE_TORCH_LIBRARY_IMPL(packmamba_cpu, CPU, m) { m.impl("probe", TORCH_BOX(&probe)); }

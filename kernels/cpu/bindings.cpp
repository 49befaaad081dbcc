// The operators of torch.ops.packmamba_cpu. They write into tensors that the caller allocates:
// contiguous, never read.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "operators.h"

namespace packmamba {
namespace {

using torch::headeronly::ScalarType;

// Calls body(a value of the storage type).
template <class Body>
void with_dtype(const Tensor& like, const Body& body) {
  switch (like.scalar_type()) {
    case ScalarType::Float: return body(float{});
    case ScalarType::Double: return body(double{});
    case ScalarType::BFloat16: return body(bfloat16{});
    case ScalarType::Half: return body(float16{});
    default: STD_TORCH_CHECK(false, "expected a floating type of 16, 32 or 64 bits");
  }
}

void conv1d_forward(const Tensor x, const Tensor weight, const OptionalTensor bias,
                    const Tensor starts, const Tensor ends, const OptionalTensor initial_state,
                    bool silu, Tensor y, OptionalTensor final_state) {
  with_dtype(x, [&](auto type) {
    using T = decltype(type);
    using R = accumulate_t<T>;
    const ConvArguments<T> in(x, weight, bias, starts, ends, initial_state, silu);
    Operators<T>::conv_forward(in, pointer<T>(y), pointer<R>(final_state));
  });
}

void conv1d_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor x,
                     const Tensor weight, const OptionalTensor bias, const Tensor starts,
                     const Tensor ends, const OptionalTensor initial_state, bool silu, Tensor dx,
                     Tensor dweight, OptionalTensor dbias, OptionalTensor dinitial) {
  with_dtype(x, [&](auto type) {
    using T = decltype(type);
    using R = accumulate_t<T>;
    const ConvArguments<T> in(x, weight, bias, starts, ends, initial_state, silu);
    const ConvGradients<T> out{pointer<T>(dx), pointer<R>(dweight), pointer<R>(dbias),
                               pointer<R>(dinitial)};
    Operators<T>::conv_backward(in, Rows<const T>(dy), pointer<const R>(dfinal), out);
  });
}

void check_saved(const Tensor& saved, const Tensor& starts, const Tensor& u) {
  STD_TORCH_CHECK(saved.size(0) >= starts.numel() + u.size(0) * u.size(1) / kChunk,
                  "too little room for the saved states");
}

void ssm_forward(const Tensor u, const Tensor delta, const Tensor A, const Tensor B, const Tensor C,
                 const OptionalTensor D, const OptionalTensor z, const OptionalTensor delta_bias,
                 bool delta_softplus, const Tensor starts, const Tensor ends,
                 const OptionalTensor initial_state, Tensor y, OptionalTensor final_state,
                 OptionalTensor saved) {
  if (saved) check_saved(*saved, starts, u);
  with_dtype(u, [&](auto type) {
    using T = decltype(type);
    using R = accumulate_t<T>;
    const ScanArguments<T> in(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends,
                              initial_state);
    Operators<T>::scan_forward(in, pointer<T>(y), pointer<R>(final_state), pointer<R>(saved),
                               saved ? saved->size(0) : 0);
  });
}

void ssm_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor u, const Tensor delta,
                  const Tensor A, const Tensor B, const Tensor C, const OptionalTensor D,
                  const OptionalTensor z, const OptionalTensor delta_bias, bool delta_softplus,
                  const Tensor starts, const Tensor ends, const OptionalTensor initial_state,
                  const Tensor saved, Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC,
                  OptionalTensor dD, OptionalTensor dz, OptionalTensor dbias,
                  OptionalTensor dinitial) {
  check_saved(saved, starts, u);
  with_dtype(u, [&](auto type) {
    using T = decltype(type);
    using R = accumulate_t<T>;
    const ScanArguments<T> in(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends,
                              initial_state);
    const ScanGradients<T> out{pointer<T>(du), pointer<T>(ddelta), pointer<T>(dB),
                               pointer<T>(dC), pointer<T>(dz),     pointer<R>(dA),
                               pointer<R>(dD), pointer<R>(dbias),  pointer<R>(dinitial)};
    Operators<T>::scan_backward(in, Rows<const T>(dy), pointer<const R>(dfinal),
                                pointer<const R>(saved), out);
  });
}

}  // namespace
}  // namespace packmamba

STABLE_TORCH_LIBRARY(packmamba_cpu, m) {
  m.def(
      "conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor starts, Tensor ends, Tensor? "
      "initial_state, bool silu, "
      "Tensor(a!) y, Tensor(b!)? final_state) -> ()");
  m.def(
      "conv1d_backward(Tensor dy, Tensor? dfinal, Tensor x, Tensor weight, Tensor? bias, Tensor "
      "starts, Tensor ends, "
      "Tensor? initial_state, bool silu, Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dbias, "
      "Tensor(d!)? dinitial_state) -> ()");
  m.def(
      "ssm_forward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, "
      "bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, Tensor(a!) y, "
      "Tensor(b!)? final_state, "
      "Tensor(c!)? saved) -> ()");
  m.def(
      "ssm_backward(Tensor dy, Tensor? dfinal, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor "
      "C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, "
      "Tensor saved, "
      "Tensor(a!) du, Tensor(b!) ddelta, Tensor(c!) dA, Tensor(d!) dB, Tensor(e!) dC, Tensor(f!)? "
      "dD, Tensor(g!)? dz, "
      "Tensor(h!)? ddelta_bias, Tensor(i!)? dinitial_state) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(packmamba_cpu, CPU, m) {
  m.impl("conv1d_forward", TORCH_BOX(&packmamba::conv1d_forward));
  m.impl("conv1d_backward", TORCH_BOX(&packmamba::conv1d_backward));
  m.impl("ssm_forward", TORCH_BOX(&packmamba::ssm_forward));
  m.impl("ssm_backward", TORCH_BOX(&packmamba::ssm_backward));
}

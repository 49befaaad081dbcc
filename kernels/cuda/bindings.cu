// The operators of torch.ops.packmamba_cuda. They write into tensors that the caller allocates, never read and contiguous (dx, dz,
// dB and dC may be slices of a contiguous tensor's last dimension), on the stream the caller names; workspaces come from PyTorch's
// allocator and go back when the call returns.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include "params.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class T> T* pointer(const Tensor& t) { return (T*)t.data_ptr(); }
template <class T> T* pointer(const OptionalTensor& t) { return t ? (T*)t->data_ptr() : nullptr; }
void* pointer(const OptionalTensor& t) { return pointer<void>(t); }

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::Float: return Dtype::float32;
    default: STD_TORCH_CHECK(false, "expected bfloat16, float16 or float32 activations");
  }
}

View view(const OptionalTensor& t) {
  if (!t) return {};
  const int64_t size = size_of(dtype_of(*t)), token = t->stride(1) * size;
  STD_TORCH_CHECK(token >= 0 && token < int64_t(1) << 31, "expected token strides below 2 GiB");
  return {t->data_ptr(), t->stride(0) * size, uint32_t(token)};
}
// Elements from a slot of an output to the next. Its rows follow one another: a slice of a contiguous tensor's last dimension.
int64_t token_stride(const OptionalTensor& t) {
  if (!t) return 0;
  STD_TORCH_CHECK(t->stride(2) == 1 && (t->size(0) == 1 || t->stride(0) == t->size(1) * t->stride(1)),
                  "expected an output whose slots are equally far apart");
  STD_TORCH_CHECK(t->stride(1) < int64_t(1) << 31, "expected token strides below 2**31");
  return t->stride(1);
}
bool even(const View& v) { return (uintptr_t)v.data % 4 == 0 && v.row_bytes % 4 == 0 && v.token_bytes % 4 == 0; }

// Room for a kernel's own sums.
struct Workspace {
  std::optional<Tensor> memory;
  float* floats(const Tensor& like, int64_t count) {
    memory = torch::stable::new_empty(like, {count}, ScalarType::Float);
    return pointer<float>(*memory);
  }
};

void launched() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel did not start: ", cudaGetErrorString(error));
}

Plan plan_of(const Tensor& starts, int64_t rows, int64_t row_length, int64_t cut_above, int64_t cut_length, int64_t window) {
  return {int(starts.numel()), int(rows), int(row_length), int(cut_above), int(cut_length), int(window)};
}

int64_t schedule_size(int64_t documents, int64_t rows, int64_t row_length, int64_t cut_above, int64_t cut_length,
                      int64_t window) {
  return Schedule::size({int(documents), int(rows), int(row_length), int(cut_above), int(cut_length), int(window)});
}

void schedule(const Tensor starts, const Tensor ends, const OptionalTensor offsets, int64_t rows, int64_t row_length, int64_t cut_above, int64_t cut_length,
              int64_t window, Tensor memory, int64_t stream) {
  const Plan plan = plan_of(starts, rows, row_length, cut_above, cut_length, window);
  STD_TORCH_CHECK(memory.numel() >= Schedule::size(plan), "too little room for the schedule");
  make_schedule(pointer<int>(starts), pointer<int>(ends), pointer<int>(offsets), plan, Schedule(pointer<int>(memory), plan), cudaStream_t(stream));
  launched();
}

ConvParams conv_params(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& starts,
                       const Tensor& ends, const OptionalTensor& initial_state, bool silu, const Tensor& memory,
                       int64_t cut_above, int64_t cut_length, int64_t window) {
  ConvParams p{};
  p.x = view(x), p.weight = pointer<float>(weight), p.bias = pointer<float>(bias), p.initial_state = pointer<float>(initial_state);
  p.starts = pointer<int>(starts), p.ends = pointer<int>(ends);
  p.schedule = Schedule(pointer<int>(memory), plan_of(starts, x.size(0), x.size(1), cut_above, cut_length, window));
  p.channels = x.size(2), p.width = weight.size(1), p.rows = x.size(0), p.row_length = x.size(1), p.documents = starts.numel();
  p.silu = silu, p.dtype = dtype_of(x);
  return p;
}

void conv1d_forward(const Tensor x, const Tensor weight, const OptionalTensor bias, const Tensor starts, const Tensor ends,
                    const OptionalTensor initial_state, bool silu, Tensor y, OptionalTensor final_state, const Tensor schedule,
                    int64_t cut_above, int64_t cut_length, int64_t window, int64_t stream) {
  ConvParams p = conv_params(x, weight, bias, starts, ends, initial_state, silu, schedule, cut_above, cut_length, window);
  p.y = y.data_ptr(), p.final_state = pointer<float>(final_state);
  conv_forward(p, cudaStream_t(stream));
  launched();
}

void conv1d_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor x, const Tensor weight, const OptionalTensor bias,
                     const Tensor starts, const Tensor ends, const OptionalTensor initial_state, bool silu, Tensor dx,
                     Tensor dweight, OptionalTensor dbias, OptionalTensor dinitial, const Tensor schedule, int64_t cut_above,
                     int64_t cut_length, int64_t window, int64_t stream) {
  ConvParams p = conv_params(x, weight, bias, starts, ends, initial_state, silu, schedule, cut_above, cut_length, window);
  p.dy = view(dy), p.dfinal = pointer<float>(dfinal), p.dx = dx.data_ptr(), p.dx_token = token_stride(dx);
  p.dweight = pointer<float>(dweight), p.dbias = pointer<float>(dbias), p.dinitial = pointer<float>(dinitial);
  Workspace work;
  p.partial = work.floats(x, conv_partials(p));
  conv_backward(p, cudaStream_t(stream));
  launched();
}

ScanParams scan_params(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                       const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& bias, bool softplus,
                       const Tensor& starts, const Tensor& ends, const OptionalTensor& initial_state, const Tensor& memory,
                       int64_t cut_above, int64_t cut_length, int64_t window) {
  ScanParams p{};
  p.u = view(u), p.delta = view(delta), p.B = view(B), p.C = view(C), p.z = view(z);
  p.A = pointer<float>(A), p.D = pointer<float>(D), p.bias = pointer<float>(bias);
  p.initial_state = pointer<float>(initial_state), p.starts = pointer<int>(starts), p.ends = pointer<int>(ends);
  p.schedule = Schedule(pointer<int>(memory), plan_of(starts, u.size(0), u.size(1), cut_above, cut_length, window));
  p.channels = u.size(2), p.states = A.size(1), p.rows = u.size(0), p.row_length = u.size(1), p.documents = starts.numel();
  p.softplus = softplus, p.dtype = dtype_of(u);
  STD_TORCH_CHECK(p.states <= 256, "expected at most 256 states per channel");
  return p;
}

// Whether the tensor-core kernels take it; a schedule that cuts is only ever made for those.
bool tuned(const ScanParams& p) {
  return p.dtype == Dtype::bfloat16 && p.states == 16 && p.channels % 2 == 0 && even(p.u) && even(p.delta) && even(p.z) &&
         even(p.B) && even(p.C);
}

// Both backwards fit what they keep into this: 16 bits a number each 32 tokens, or 32 bits each 64.
void check_saved(const Tensor& saved, const ScanParams& p) {
  STD_TORCH_CHECK(saved.numel() >= p.slots() / SAVE_EVERY * p.channels * p.states, "too little room for the saved states");
}

void zero_output_padding(const ScanParams& p, void* output, int64_t token, cudaStream_t stream) {
  const int64_t size = size_of(p.dtype);
  zero_padding(output, token * size, p.channels * size, p.schedule.row_ends, p.rows, p.row_length, stream);
}

void ssm_forward(const Tensor u, const Tensor delta, const Tensor A, const Tensor B, const Tensor C, const OptionalTensor D,
                 const OptionalTensor z, const OptionalTensor delta_bias, bool delta_softplus, const Tensor starts,
                 const Tensor ends, const OptionalTensor initial_state, Tensor y, OptionalTensor final_state,
                 OptionalTensor saved, const Tensor schedule, int64_t cut_above, int64_t cut_length, int64_t window,
                 int64_t stream) {
  ScanParams p = scan_params(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, initial_state, schedule,
                             cut_above, cut_length, window);
  if (saved) check_saved(*saved, p);
  p.y = y.data_ptr(), p.final_state = pointer<float>(final_state), p.saved = pointer(saved);
  const bool tensor_cores = p.documents && tuned(p);
  if (!tensor_cores)
    zero_output_padding(p, p.y, p.channels, cudaStream_t(stream));
  if (p.documents) {
    Workspace work;
    const int64_t cuts = (int64_t)p.schedule.max_cut_segments * p.channels;
    if (cuts) p.cut_states = work.floats(u, cuts * (p.states + 1)), p.cut_sums = p.cut_states + cuts * p.states;
    (tensor_cores ? scan16_forward : scan_forward)(p, cudaStream_t(stream));
  }
  launched();
}

void ssm_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor u, const Tensor delta, const Tensor A,
                  const Tensor B, const Tensor C, const OptionalTensor D, const OptionalTensor z,
                  const OptionalTensor delta_bias, bool delta_softplus, const Tensor starts, const Tensor ends,
                  const OptionalTensor initial_state, const Tensor saved, Tensor du, Tensor ddelta, Tensor dA, Tensor dB,
                  Tensor dC, OptionalTensor dD, OptionalTensor dz, OptionalTensor dbias, OptionalTensor dinitial,
                  const Tensor schedule, int64_t cut_above, int64_t cut_length, int64_t window, int64_t stream,
                  OptionalTensor y) {
  ScanParams p = scan_params(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, initial_state, schedule,
                             cut_above, cut_length, window);
  check_saved(saved, p);
  STD_TORCH_CHECK(!y || z, "expected z where y is wanted");
  p.y = pointer(y);
  p.dy = view(dy), p.dfinal = pointer<float>(dfinal), p.saved = saved.data_ptr();
  p.du = du.data_ptr(), p.ddelta = ddelta.data_ptr(), p.dz = pointer(dz), p.dB = dB.data_ptr(), p.dC = dC.data_ptr();
  p.dz_token = token_stride(dz), p.dB_token = token_stride(dB), p.dC_token = token_stride(dC);
  p.dA = pointer<float>(dA), p.dD = pointer<float>(dD), p.dbias = pointer<float>(dbias), p.dinitial = pointer<float>(dinitial);
  const bool tensor_cores = p.documents && tuned(p);
  STD_TORCH_CHECK(!tensor_cores || even(p.dy), "expected dy aligned to 4 bytes");
  STD_TORCH_CHECK(!tensor_cores || ((uintptr_t)p.dz % 4 == 0 && p.dz_token % 2 == 0), "expected dz aligned to 4 bytes");
  if (!tensor_cores) {
    zero_output_padding(p, p.du, p.channels, cudaStream_t(stream));
    zero_output_padding(p, p.ddelta, p.channels, cudaStream_t(stream));
    if (p.dz) zero_output_padding(p, p.dz, p.dz_token, cudaStream_t(stream));
    if (p.y) zero_output_padding(p, p.y, p.channels, cudaStream_t(stream));
  }
  const int block_channels = tensor_cores ? SCAN16_BLOCK_CHANNELS : scan_block_channels(p.states);
  const int64_t blocks = (p.channels + block_channels - 1) / block_channels, items = p.schedule.max_items;
  const int64_t sums_BC = blocks * p.slots() * 2 * p.states, sums = items * p.channels;
  const int64_t cuts = (int64_t)p.schedule.max_cut_segments * p.channels;
  Workspace work;
  p.partial_BC = work.floats(u, sums_BC + (sums + cuts) * (p.states + 1) + sums);
  p.partial_A = p.partial_BC + sums_BC, p.cut_states = p.partial_A + sums * p.states;
  p.partial_D = p.cut_states + cuts * p.states, p.partial_bias = p.partial_D + sums, p.cut_sums = p.partial_bias + sums;
  if (!p.documents) scan_reduce(p, blocks, cudaStream_t(stream));
  else (tensor_cores ? scan16_backward : scan_backward)(p, cudaStream_t(stream));
  launched();
}

}  // namespace

#define SCHEDULE "Tensor schedule, int cut_above, int cut_length, int window, int stream"

STABLE_TORCH_LIBRARY(packmamba_cuda, m) {
  m.def(
      "schedule_size(int documents, int rows, int row_length, int cut_above, int cut_length, int window) -> int");
  m.def(
      "schedule(Tensor starts, Tensor ends, Tensor? offsets, int rows, int row_length, int cut_above, int cut_length, int window, "
      "Tensor(a!) memory, int stream) -> ()");
  m.def(
      "conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor starts, Tensor ends, Tensor? initial_state, bool silu, "
      "Tensor(a!) y, Tensor(b!)? final_state, " SCHEDULE ") -> ()");
  m.def(
      "conv1d_backward(Tensor dy, Tensor? dfinal, Tensor x, Tensor weight, Tensor? bias, Tensor starts, Tensor ends, "
      "Tensor? initial_state, bool silu, Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dbias, Tensor(d!)? dinitial_state, " SCHEDULE
      ") -> ()");
  m.def(
      "ssm_forward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, Tensor(a!) y, Tensor(b!)? final_state, "
      "Tensor(c!)? saved, " SCHEDULE ") -> ()");
  m.def(
      "ssm_backward(Tensor dy, Tensor? dfinal, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, Tensor saved, "
      "Tensor(a!) du, Tensor(b!) ddelta, Tensor(c!) dA, Tensor(d!) dB, Tensor(e!) dC, Tensor(f!)? dD, Tensor(g!)? dz, "
      "Tensor(h!)? ddelta_bias, Tensor(i!)? dinitial_state, " SCHEDULE ", Tensor(j!)? y=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(packmamba_cuda, CompositeExplicitAutograd, m) { m.impl("schedule_size", TORCH_BOX(&schedule_size)); }

STABLE_TORCH_LIBRARY_IMPL(packmamba_cuda, CUDA, m) {
  m.impl("schedule", TORCH_BOX(&schedule));
  m.impl("conv1d_forward", TORCH_BOX(&conv1d_forward));
  m.impl("conv1d_backward", TORCH_BOX(&conv1d_backward));
  m.impl("ssm_forward", TORCH_BOX(&ssm_forward));
  m.impl("ssm_backward", TORCH_BOX(&ssm_backward));
}

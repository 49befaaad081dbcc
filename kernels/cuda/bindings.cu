// The operators of torch.ops.packmamba_cuda; their schemas are at the end of this file.
//
// They write into tensors that the caller allocates, never read and contiguous (dx, dz, dB and dC
// may be slices of a contiguous tensor's last dimension), on the stream the caller names.
// Workspaces come from PyTorch's allocator and go back when the call returns: the allocator gives
// them to work behind on the same stream alone.
//
// On PyTorch's stable ABI: neither ATen nor CUDA headers of PyTorch, so that one library serves
// several versions, and loads where there is no GPU.
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

template <class T>
T* pointer(const Tensor& tensor) {
  return (T*)tensor.data_ptr();
}
template <class T>
T* pointer(const OptionalTensor& tensor) {
  return tensor ? (T*)tensor->data_ptr() : nullptr;
}
void* pointer(const OptionalTensor& tensor) { return pointer<void>(tensor); }

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::Float: return Dtype::float32;
    default: STD_TORCH_CHECK(false, "expected bfloat16, float16 or float32 activations");
  }
}

View view(const OptionalTensor& tensor) {
  if (!tensor) return {};
  const int64_t size = size_of(dtype_of(*tensor));
  const int64_t token = tensor->stride(1) * size;
  STD_TORCH_CHECK(token >= 0 && token < int64_t(1) << 31, "expected token strides below 2 GiB");
  return {tensor->data_ptr(), tensor->stride(0) * size, uint32_t(token)};
}
// Elements from a slot of an output to the next. Its rows follow one another: a slice of a
// contiguous tensor's last dimension.
int64_t token_stride(const OptionalTensor& tensor) {
  if (!tensor) return 0;
  STD_TORCH_CHECK(
      tensor->stride(2) == 1 &&
          (tensor->size(0) == 1 || tensor->stride(0) == tensor->size(1) * tensor->stride(1)),
      "expected an output whose slots are equally far apart");
  STD_TORCH_CHECK(tensor->stride(1) < int64_t(1) << 31, "expected token strides below 2**31");
  return tensor->stride(1);
}
// Whether pairs of bfloat16 can be read at once.
bool even(const View& view) {
  return (uintptr_t)view.data % 4 == 0 && view.row_bytes % 4 == 0 && view.token_bytes % 4 == 0;
}

// Float32 room for a kernel's own sums, as long as the object lives.
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

Plan plan_of(const Tensor& starts, int64_t rows, int64_t row_length, int64_t cut_above,
             int64_t cut_length, int64_t window) {
  return {int(starts.numel()), int(rows),       int(row_length),
          int(cut_above),      int(cut_length), int(window)};
}

int64_t schedule_size(int64_t documents, int64_t rows, int64_t row_length, int64_t cut_above,
                      int64_t cut_length, int64_t window) {
  return Schedule::size(
      {int(documents), int(rows), int(row_length), int(cut_above), int(cut_length), int(window)});
}

void schedule(const Tensor starts, const Tensor ends, const OptionalTensor offsets, int64_t rows,
              int64_t row_length, int64_t cut_above, int64_t cut_length, int64_t window,
              Tensor memory, int64_t stream) {
  const Plan plan = plan_of(starts, rows, row_length, cut_above, cut_length, window);
  STD_TORCH_CHECK(memory.numel() >= Schedule::size(plan), "too little room for the schedule");
  make_schedule(pointer<int>(starts), pointer<int>(ends), pointer<int>(offsets), plan,
                Schedule(pointer<int>(memory), plan), cudaStream_t(stream));
  launched();
}

ConvParams conv_params(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& starts, const Tensor& ends,
                       const OptionalTensor& initial_state, bool silu, const Tensor& memory,
                       int64_t cut_above, int64_t cut_length, int64_t window) {
  ConvParams params{};
  params.x = view(x);
  params.weight = pointer<float>(weight);
  params.bias = pointer<float>(bias);
  params.initial_state = pointer<float>(initial_state);
  params.starts = pointer<int>(starts);
  params.ends = pointer<int>(ends);
  params.schedule = Schedule(pointer<int>(memory),
                             plan_of(starts, x.size(0), x.size(1), cut_above, cut_length, window));
  params.channels = x.size(2);
  params.width = weight.size(1);
  params.rows = x.size(0);
  params.row_length = x.size(1);
  params.documents = starts.numel();
  params.silu = silu;
  params.dtype = dtype_of(x);
  return params;
}

void conv1d_forward(const Tensor x, const Tensor weight, const OptionalTensor bias,
                    const Tensor starts, const Tensor ends, const OptionalTensor initial_state,
                    bool silu, Tensor y, OptionalTensor final_state, const Tensor schedule,
                    int64_t cut_above, int64_t cut_length, int64_t window, int64_t stream) {
  ConvParams params = conv_params(x, weight, bias, starts, ends, initial_state, silu, schedule,
                                  cut_above, cut_length, window);
  params.y = y.data_ptr();
  params.final_state = pointer<float>(final_state);
  conv_forward(params, cudaStream_t(stream));
  launched();
}

void conv1d_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor x,
                     const Tensor weight, const OptionalTensor bias, const Tensor starts,
                     const Tensor ends, const OptionalTensor initial_state, bool silu, Tensor dx,
                     Tensor dweight, OptionalTensor dbias, OptionalTensor dinitial,
                     const Tensor schedule, int64_t cut_above, int64_t cut_length, int64_t window,
                     int64_t stream) {
  ConvParams params = conv_params(x, weight, bias, starts, ends, initial_state, silu, schedule,
                                  cut_above, cut_length, window);
  params.dy = view(dy);
  params.dfinal = pointer<float>(dfinal);
  params.dx = dx.data_ptr();
  params.dx_token = token_stride(dx);
  params.dweight = pointer<float>(dweight);
  params.dbias = pointer<float>(dbias);
  params.dinitial = pointer<float>(dinitial);
  Workspace work;
  params.partial = work.floats(x, conv_partials(params));
  conv_backward(params, cudaStream_t(stream));
  launched();
}

ScanParams scan_params(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                       const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                       const OptionalTensor& bias, bool softplus, const Tensor& starts,
                       const Tensor& ends, const OptionalTensor& initial_state,
                       const Tensor& memory, int64_t cut_above, int64_t cut_length,
                       int64_t window) {
  ScanParams params{};
  params.u = view(u);
  params.delta = view(delta);
  params.B = view(B);
  params.C = view(C);
  params.z = view(z);
  params.A = pointer<float>(A);
  params.D = pointer<float>(D);
  params.bias = pointer<float>(bias);
  params.initial_state = pointer<float>(initial_state);
  params.starts = pointer<int>(starts);
  params.ends = pointer<int>(ends);
  params.schedule = Schedule(pointer<int>(memory),
                             plan_of(starts, u.size(0), u.size(1), cut_above, cut_length, window));
  params.channels = u.size(2);
  params.states = A.size(1);
  params.rows = u.size(0);
  params.row_length = u.size(1);
  params.documents = starts.numel();
  params.softplus = softplus;
  params.dtype = dtype_of(u);
  STD_TORCH_CHECK(params.states <= 256, "expected at most 256 states per channel");
  return params;
}

// Whether the tensor-core kernels take it.
bool tuned(const ScanParams& params) {
  return params.dtype == Dtype::bfloat16 && params.states == 16 && params.channels % 2 == 0 &&
         even(params.u) && even(params.delta) && even(params.z) && even(params.B) && even(params.C);
}

// Both backwards fit what they keep into this: 16 bits a number each 32 tokens, or 32 bits each 64.
void check_saved(const Tensor& saved, const ScanParams& params) {
  STD_TORCH_CHECK(saved.numel() >= params.slots() / SAVE_EVERY * params.channels * params.states,
                  "too little room for the saved states");
}

void zero_output_padding(const ScanParams& params, void* output, int64_t token,
                         cudaStream_t stream) {
  const int64_t size = size_of(params.dtype);
  zero_padding(output, token * size, params.channels * size, params.schedule.row_ends, params.rows,
               params.row_length, stream);
}

void ssm_forward(const Tensor u, const Tensor delta, const Tensor A, const Tensor B, const Tensor C,
                 const OptionalTensor D, const OptionalTensor z, const OptionalTensor delta_bias,
                 bool delta_softplus, const Tensor starts, const Tensor ends,
                 const OptionalTensor initial_state, Tensor y, OptionalTensor final_state,
                 OptionalTensor saved, const Tensor schedule, int64_t cut_above, int64_t cut_length,
                 int64_t window, int64_t stream) {
  ScanParams params = scan_params(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends,
                                  initial_state, schedule, cut_above, cut_length, window);
  if (saved) check_saved(*saved, params);
  params.y = y.data_ptr();
  params.final_state = pointer<float>(final_state);
  params.saved = pointer(saved);
  const bool tensor_cores = params.documents && tuned(params);
  if (!tensor_cores) zero_output_padding(params, params.y, params.channels, cudaStream_t(stream));
  if (params.documents) {
    Workspace work;
    const int64_t cuts = (int64_t)params.schedule.max_cut_segments * params.channels;
    if (cuts) {
      params.cut_states = work.floats(u, cuts * (params.states + 1));
      params.cut_sums = params.cut_states + cuts * params.states;
    }
    (tensor_cores ? scan16_forward : scan_forward)(params, cudaStream_t(stream));
  }
  launched();
}

void ssm_backward(const Tensor dy, const OptionalTensor dfinal, const Tensor u, const Tensor delta,
                  const Tensor A, const Tensor B, const Tensor C, const OptionalTensor D,
                  const OptionalTensor z, const OptionalTensor delta_bias, bool delta_softplus,
                  const Tensor starts, const Tensor ends, const OptionalTensor initial_state,
                  const Tensor saved, Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC,
                  OptionalTensor dD, OptionalTensor dz, OptionalTensor dbias,
                  OptionalTensor dinitial, const Tensor schedule, int64_t cut_above,
                  int64_t cut_length, int64_t window, int64_t stream, OptionalTensor y) {
  ScanParams params = scan_params(u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends,
                                  initial_state, schedule, cut_above, cut_length, window);
  check_saved(saved, params);
  STD_TORCH_CHECK(!y || z, "expected z where y is wanted");
  params.y = pointer(y);
  params.dy = view(dy);
  params.dfinal = pointer<float>(dfinal);
  params.saved = saved.data_ptr();
  params.du = du.data_ptr();
  params.ddelta = ddelta.data_ptr();
  params.dz = pointer(dz);
  params.dB = dB.data_ptr();
  params.dC = dC.data_ptr();
  params.dz_token = token_stride(dz);
  params.dB_token = token_stride(dB);
  params.dC_token = token_stride(dC);
  params.dA = pointer<float>(dA);
  params.dD = pointer<float>(dD);
  params.dbias = pointer<float>(dbias);
  params.dinitial = pointer<float>(dinitial);
  const bool tensor_cores = params.documents && tuned(params);
  STD_TORCH_CHECK(!tensor_cores || even(params.dy), "expected dy aligned to 4 bytes");
  STD_TORCH_CHECK(!tensor_cores || ((uintptr_t)params.dz % 4 == 0 && params.dz_token % 2 == 0),
                  "expected dz aligned to 4 bytes");
  if (!tensor_cores) {
    zero_output_padding(params, params.du, params.channels, cudaStream_t(stream));
    zero_output_padding(params, params.ddelta, params.channels, cudaStream_t(stream));
    if (params.dz) zero_output_padding(params, params.dz, params.dz_token, cudaStream_t(stream));
    if (params.y) zero_output_padding(params, params.y, params.channels, cudaStream_t(stream));
  }
  const int block_channels =
      tensor_cores ? SCAN16_BLOCK_CHANNELS : scan_block_channels(params.states);
  const int64_t blocks = (params.channels + block_channels - 1) / block_channels;
  const int64_t items = params.schedule.max_items;
  const int64_t sums_BC = blocks * params.slots() * 2 * params.states;
  const int64_t sums = items * params.channels;
  const int64_t cuts = (int64_t)params.schedule.max_cut_segments * params.channels;
  Workspace work;
  params.partial_BC = work.floats(u, sums_BC + (sums + cuts) * (params.states + 1) + sums);
  params.partial_A = params.partial_BC + sums_BC;
  params.cut_states = params.partial_A + sums * params.states;
  params.partial_D = params.cut_states + cuts * params.states;
  params.partial_bias = params.partial_D + sums;
  params.cut_sums = params.partial_bias + sums;
  if (!params.documents)
    scan_reduce(params, blocks, cudaStream_t(stream));
  else
    (tensor_cores ? scan16_backward : scan_backward)(params, cudaStream_t(stream));
  launched();
}

}  // namespace

#define SCHEDULE "Tensor schedule, int cut_above, int cut_length, int window, int stream"

STABLE_TORCH_LIBRARY(packmamba_cuda, library) {
  library.def(
      "schedule_size(int documents, int rows, int row_length, int cut_above, int cut_length, int "
      "window) -> int");
  library.def(
      "schedule(Tensor starts, Tensor ends, Tensor? offsets, int rows, int row_length, int "
      "cut_above, int cut_length, int window, "
      "Tensor(a!) memory, int stream) -> ()");
  library.def(
      "conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor starts, Tensor ends, Tensor? "
      "initial_state, bool silu, "
      "Tensor(a!) y, Tensor(b!)? final_state, " SCHEDULE ") -> ()");
  library.def(
      "conv1d_backward(Tensor dy, Tensor? dfinal, Tensor x, Tensor weight, Tensor? bias, Tensor "
      "starts, Tensor ends, "
      "Tensor? initial_state, bool silu, Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dbias, "
      "Tensor(d!)? dinitial_state, " SCHEDULE ") -> ()");
  library.def(
      "ssm_forward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, "
      "bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, Tensor(a!) y, "
      "Tensor(b!)? final_state, "
      "Tensor(c!)? saved, " SCHEDULE ") -> ()");
  library.def(
      "ssm_backward(Tensor dy, Tensor? dfinal, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor "
      "C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus, Tensor starts, Tensor ends, Tensor? initial_state, "
      "Tensor saved, "
      "Tensor(a!) du, Tensor(b!) ddelta, Tensor(c!) dA, Tensor(d!) dB, Tensor(e!) dC, Tensor(f!)? "
      "dD, Tensor(g!)? dz, "
      "Tensor(h!)? ddelta_bias, Tensor(i!)? dinitial_state, " SCHEDULE
      ", Tensor(j!)? y=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(packmamba_cuda, CompositeExplicitAutograd, library) {
  library.impl("schedule_size", TORCH_BOX(&schedule_size));
}

STABLE_TORCH_LIBRARY_IMPL(packmamba_cuda, CUDA, library) {
  library.impl("schedule", TORCH_BOX(&schedule));
  library.impl("conv1d_forward", TORCH_BOX(&conv1d_forward));
  library.impl("conv1d_backward", TORCH_BOX(&conv1d_backward));
  library.impl("ssm_forward", TORCH_BOX(&ssm_forward));
  library.impl("ssm_backward", TORCH_BOX(&ssm_backward));
}

// What the kernels' bounds are measured with: the vector functions one by one, and the rates of
// multiply-adds and exponentials.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

#include "tensors.h"

namespace packmamba {
namespace {

template <class R>
void apply(const std::string& function, const R* x, int64_t size, R* y) {
  for (int64_t i = 0; i < size; i += kLanes<R>) {
    const int count = int(std::min<int64_t>(kLanes<R>, size - i));
    const Vec<R> input = load(x + i, count);
    Vec<R> output;
    if (function == "exp2")
      output = exp2_lanes(input);
    else if (function == "softplus")
      output = softplus_lanes(input);
    else
      output = sigmoid_lanes(input);
    store(y + i, output, count);
  }
}

void elementwise(const Tensor x, std::string function, Tensor y) {
  STD_TORCH_CHECK(function == "exp2" || function == "softplus" || function == "sigmoid",
                  "unknown function");
  if (x.scalar_type() == torch::headeronly::ScalarType::Double)
    apply(function, pointer<const double>(x), x.numel(), pointer<double>(y));
  else
    apply(function, pointer<const float>(x), x.numel(), pointer<float>(y));
}

// Every thread runs `rounds` rounds of independent operations on `chains` vectors of float32: too
// few wait for one another, more than there are registers wait for memory. `sink` has room for a
// vector of each thread.
template <int chains, class Step>
void run_chains(int64_t rounds, const Tensor& sink, const Step& step) {
  const int64_t threads = torch::stable::get_num_threads();
  STD_TORCH_CHECK(sink.numel() >= threads * kLanes<float>, "sink is too small");
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      float* place = pointer<float>(sink) + thread * kLanes<float>;
      Vec<float> values[chains];
      Vec<float> total{};
      for (int i = 0; i < chains; ++i)
        values[i] = load(place) + float(i) / chains;
      for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 16
        for (int i = 0; i < chains; ++i)
          values[i] = step(values[i]);
      for (int i = 0; i < chains; ++i)
        total += values[i];
      store(place, total);
    }
  });
}
template <class Step>
void run(int64_t rounds, int64_t chains, const Tensor& sink, const Step& step) {
  switch (chains) {
    case 4: return run_chains<4>(rounds, sink, step);
    case 8: return run_chains<8>(rounds, sink, step);
    case 12: return run_chains<12>(rounds, sink, step);
    case 16: return run_chains<16>(rounds, sink, step);
    default: STD_TORCH_CHECK(false, "expected 4, 8, 12 or 16 chains");
  }
}

void multiply_adds(int64_t rounds, int64_t chains, Tensor sink) {
  const Vec<float> factor = broadcast(0.999f);
  const Vec<float> term = broadcast(0.001f);
  run(rounds, chains, sink, [=](Vec<float> v) { return v * factor + term; });
}
void exponentials(int64_t rounds, int64_t chains, Tensor sink) {
  run(rounds, chains, sink, [](Vec<float> v) { return exp2_lanes(v - 1.5f); });
}
int64_t float32_lanes() { return kLanes<float>; }

}  // namespace
}  // namespace packmamba

STABLE_TORCH_LIBRARY_FRAGMENT(packmamba_cpu, m) {
  m.def("elementwise(Tensor x, str function, Tensor(a!) y) -> ()");
  m.def("multiply_adds(int rounds, int chains, Tensor(a!) sink) -> ()");
  m.def("exponentials(int rounds, int chains, Tensor(a!) sink) -> ()");
  m.def("float32_lanes() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(packmamba_cpu, CompositeExplicitAutograd, m) {
  m.impl("elementwise", TORCH_BOX(&packmamba::elementwise));
  m.impl("multiply_adds", TORCH_BOX(&packmamba::multiply_adds));
  m.impl("exponentials", TORCH_BOX(&packmamba::exponentials));
  m.impl("float32_lanes", TORCH_BOX(&packmamba::float32_lanes));
}

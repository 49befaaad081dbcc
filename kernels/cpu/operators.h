// What each storage type's source file offers to bindings.cpp.
#pragma once
#include "conv1d.h"
#include "ssm.h"

namespace packmamba {

template <class T>
struct Operators {
  using R = accumulate_t<T>;
  static void conv_forward(const ConvArguments<T>& in, T* y, R* final_state);
  static void conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const R* dfinal,
                            const ConvGradients<T>& out);
  static void scan_forward(const ScanArguments<T>& in, T* y, R* final_state, R* saved,
                           int64_t saved_places);
  static void scan_backward(const ScanArguments<T>& in, Rows<const T> dy, const R* dfinal,
                            const R* saved, const ScanGradients<T>& out);
};

}  // namespace packmamba

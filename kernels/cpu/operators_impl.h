// Instantiates one storage type: each has its own small source file, so that builds run in
// parallel.
#pragma once
#include "operators.h"
#include "ssm_backward.h"
#include "ssm_forward.h"

namespace packmamba {

template <class T>
void Operators<T>::conv_forward(const ConvArguments<T>& in, T* y, R* final_state) {
  with_taps(in.taps,
            [&](auto taps) { packmamba::conv_forward<T, taps.value>(in, y, final_state); });
}
template <class T>
void Operators<T>::conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const R* dfinal,
                                 const ConvGradients<T>& out) {
  with_taps(in.taps,
            [&](auto taps) { packmamba::conv_backward<T, taps.value>(in, dy, dfinal, out); });
}
template <class T>
void Operators<T>::scan_forward(const ScanArguments<T>& in, T* y, R* final_state, R* saved,
                                int64_t saved_places) {
  packmamba::scan_forward<T>(in, y, final_state, saved, saved_places);
}
template <class T>
void Operators<T>::scan_backward(const ScanArguments<T>& in, Rows<const T> dy, const R* dfinal,
                                 const R* saved, const ScanGradients<T>& out) {
  packmamba::scan_backward<T>(in, dy, dfinal, saved, out);
}

}  // namespace packmamba

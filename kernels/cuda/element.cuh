// Elements of activations as float, and a dtype chosen at run time as a template argument.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdexcept>
#include "params.h"

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <class T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// The element of a (B, L, *) tensor's first slot of a run; later slots are token_bytes apart.
template <class T> __device__ __forceinline__ const T* element_at(const View& v, int slot, int row_length, int element) {
  const int row = slot / row_length;
  return (const T*)((const char*)v.data + row * v.row_bytes + (uint64_t)(slot - row * row_length) * v.token_bytes) + element;
}
template <class T> __device__ __forceinline__ float later(const T* first, const View& v, int t) {
  return to_float(*(const T*)((const char*)first + (uint64_t)(uint32_t)t * v.token_bytes));
}

template <class F> void with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::bfloat16) return f(__nv_bfloat16());
#ifdef PACKMAMBA_REDUCED  // a third of the time to compile, for tests of the build where there is no GPU
  throw std::invalid_argument("a reduced build has kernels for bfloat16 alone");
#else
  if (dtype == Dtype::float16) f(__half());
  else f(float());
#endif
}

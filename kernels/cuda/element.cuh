// Elements of activations as float, and a dtype chosen at run time as a template argument.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdexcept>
#include "params.h"

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// The element of a (B, L, *) tensor's first slot of a run; later slots are token_bytes apart.
template <class T>
__device__ __forceinline__ const T* element_at(const View& view, int slot, int row_length,
                                               int element) {
  const int row = slot / row_length;
  return (const T*)((const char*)view.data + row * view.row_bytes +
                    (uint64_t)(slot - row * row_length) * view.token_bytes) +
         element;
}
template <class T>
__device__ __forceinline__ T later(const T* first, const View& view, int token) {
  return *(const T*)((const char*)first + (uint64_t)(uint32_t)token * view.token_bytes);
}

// Calls body(a value of the element type).
template <class Body>
void with_dtype(Dtype dtype, Body body) {
  if (dtype == Dtype::bfloat16) return body(__nv_bfloat16());
  if (dtype == Dtype::float16)
    body(__half());
  else
    body(float());
}

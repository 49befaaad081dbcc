// What the convolution's kernels share: vectors of channels, and the walk over a tile's documents.
#pragma once
#include "element.cuh"

constexpr int TILES_PER_BLOCK = 4;  // one warp each

// V neighbouring channels; V > 1 needs addresses that are multiples of their size.
template <class T, int V> struct alignas(sizeof(T) * V) Vector {
  T v[V];
};
template <class T, int V> __device__ __forceinline__ void unpack(float (&x)[V], const Vector<T, V>& from) {
#pragma unroll
  for (int c = 0; c < V; c++) x[c] = to_float(from.v[c]);
}
template <class T, int V> __device__ __forceinline__ void load(float (&x)[V], const T* from) {
  unpack(x, *(const Vector<T, V>*)from);
}
template <class T, int V> __device__ __forceinline__ void store(T* to, const float (&x)[V]) {
  Vector<T, V> v;
#pragma unroll
  for (int c = 0; c < V; c++) v.v[c] = from_float<T>(x[c]);
  *(Vector<T, V>*)to = v;
}
__device__ __forceinline__ float fast_ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.f, 1.f + fast_ex2(-1.4426950408889634f * x)); }

// The document at a slot, moving forward; the next one's place is loaded ahead. Uniform over a warp.
struct Walk {
  const int *starts, *ends;
  int documents, document, start, end, next_start, next_end;
  __device__ Walk(const ConvParams& p, int first) : starts(p.starts), ends(p.ends), documents(p.documents), document(first) {
    bounds(document, start, end), bounds(document + 1, next_start, next_end);
  }
  __device__ void bounds(int d, int& a, int& b) const {
    a = d < documents ? starts[d] : 0x7fffffff, b = d < documents ? ends[d] : 0x7fffffff;
  }
  __device__ void reach(int slot) {
    if (slot >= end) document++, start = next_start, end = next_end, bounds(document + 1, next_start, next_end);
  }
};

template <class T, int V, int GROUP>
__device__ __forceinline__ void load_group(Vector<T, V> (&group)[GROUP], const T* base, const View& v, int t0) {
  const char* first = (const char*)base + (int64_t)t0 * v.token_bytes;
#pragma unroll
  for (int i = 0; i < GROUP; i++) group[i] = *(const Vector<T, V>*)(first + (uint64_t)i * v.token_bytes);
}

// A tile of CONV_TILE slots of one row.
struct Tile {
  int first, end, index;
  __device__ explicit Tile(const ConvParams& p) {
    const int per_row = (p.row_length + CONV_TILE - 1) / CONV_TILE;
    index = blockIdx.x * TILES_PER_BLOCK + (threadIdx.x >> 5);
    const int row = index / per_row, row_end = (row + 1) * p.row_length;
    first = row * p.row_length + index % per_row * CONV_TILE, end = min(first + CONV_TILE, row_end);
    if (row >= p.rows) first = end = 0, index = -1;
  }
};

// The W - 1 inputs before a slot of a document, oldest first: slots of the document, then its initial state, or zeros.
template <class T, int W, int V>
__device__ __forceinline__ void load_window(float (&window)[W - 1][V], const ConvParams& p, const Walk& walk, int slot,
                                            int channel, const T* row) {
#pragma unroll
  for (int k = 0; k < W - 1; k++) {
    const int place = slot - (W - 1) + k - walk.start;
    if (slot < walk.start) {  // padding
#pragma unroll
      for (int c = 0; c < V; c++) window[k][c] = 0.f;
    } else if (place >= 0) {
      load(window[k], (const T*)((const char*)row + (int64_t)(slot - (W - 1) + k) * p.x.token_bytes));
    } else {
#pragma unroll
      for (int c = 0; c < V; c++)
        window[k][c] = p.initial_state
                           ? p.initial_state[((int64_t)walk.document * p.channels + channel + c) * (W - 1) + W - 1 + place]
                           : 0.f;
    }
  }
}

// The tensor's data as if slots were counted within this row from slot 0: add slot * token_bytes.
template <class T> __device__ __forceinline__ const T* row_base(const View& v, int slot, int row_length, int channel) {
  const int row = slot / row_length;
  return (const T*)((const char*)v.data + row * v.row_bytes - (int64_t)row * row_length * v.token_bytes) + channel;
}
template <class T> __device__ __forceinline__ const T* at_slot(const T* base, const View& v, int slot) {
  return (const T*)((const char*)base + (int64_t)slot * v.token_bytes);
}
template <int W, int V>
__device__ __forceinline__ void load_weight(float (&weight)[W][V], float (&bias)[V], const ConvParams& p, int channel) {
#pragma unroll
  for (int c = 0; c < V; c++) {
#pragma unroll
    for (int k = 0; k < W; k++) weight[k][c] = p.weight[(int64_t)(channel + c) * W + k];
    bias[c] = p.bias ? p.bias[channel + c] : 0.f;
  }
}

// Calls launch with the element type, the width and the number of channels a thread takes, as types.
template <int I> struct Int {
  static constexpr int value = I;
};
template <int VECTOR, class F> void with_shape(const ConvParams& p, F launch) {
  const int bytes = VECTOR * (p.dtype == Dtype::float32 ? 4 : 2);
  auto aligned = [&](const View& v) {
    return (uintptr_t)v.data % bytes == 0 && v.row_bytes % bytes == 0 && v.token_bytes % bytes == 0;
  };
  const bool wide = p.channels % VECTOR == 0 && aligned(p.x) && aligned(p.dy) &&
                    ((uintptr_t)p.dx | p.dx_token * (bytes / VECTOR)) % bytes == 0;
  with_dtype(p.dtype, [&](auto t) {
    auto with_width = [&](auto v) {
      if (p.width == 2) launch(t, Int<2>(), v);
      else if (p.width == 3) launch(t, Int<3>(), v);
      else launch(t, Int<4>(), v);
    };
    if (wide) with_width(Int<VECTOR>());
    else with_width(Int<1>());
  });
}
inline dim3 conv_grid(const ConvParams& p, int vector) {
  return dim3(conv_blocks(p.rows, p.row_length), (p.channels + 32 * vector - 1) / (32 * vector));
}

// What the convolution's kernels share: vectors of channels, copies ahead, and the walk over a span's documents.
#pragma once
#include <type_traits>
#include "element.cuh"

constexpr int WARPS = 4;  // of a block, on neighbouring channels of one span
constexpr int MIN_SPAN = 32, MAX_SPAN = 256;  // slots
constexpr int GROUP = 8;  // slots that are copied and computed together; at least W - 1

// V neighbouring channels; V > 1 needs addresses that are multiples of their size.
template <class T, int V> struct alignas(sizeof(T) * V) Vector {
  T v[V];
};
template <int BYTES> struct Words;
template <> struct Words<2> { using type = uint16_t; };
template <> struct Words<4> { using type = uint32_t; };
template <> struct Words<8> { using type = uint2; };
template <> struct Words<16> { using type = uint4; };
template <class T, int V> __device__ __forceinline__ void load(float (&x)[V], const T* from) {
  using W = typename Words<sizeof(T) * V>::type;
  const W words = *(const W*)from;  // one access, which the compiler would split
  if constexpr (std::is_same<T, __nv_bfloat16>::value && V > 1) {
#pragma unroll
    for (int c = 0; c < V; c++) {
      const uint32_t pair = ((const uint32_t*)&words)[c / 2];
      x[c] = __uint_as_float(c % 2 ? pair & 0xffff0000u : pair << 16);
    }
  } else {
#pragma unroll
    for (int c = 0; c < V; c++) x[c] = to_float(((const T*)&words)[c]);
  }
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
__device__ __forceinline__ float fast_rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Where a SiLU follows, weights and bias are scaled so that sums are exponents: sigmoid(x) = 1 / (1 + 2^(x * SILU_SCALE)).
constexpr float LN2 = 0.6931471805599453f, SILU_SCALE = -1 / LN2;
// sigmoid / SILU_SCALE
__device__ __forceinline__ float scaled_sigmoid(float exponent) {
  return fast_rcp(fmaf(fast_ex2(exponent), SILU_SCALE, SILU_SCALE));
}

// The document at a slot, moving forward; the next one's place is loaded ahead. Uniform over a warp.
struct Walk {
  const int *starts, *ends;
  int documents, document, start, end, next_start, next_end;
  __device__ Walk(const ConvParams& p, int slot) : starts(p.starts), ends(p.ends), documents(p.documents) {
    const int row = slot / p.row_length, tiles = (p.row_length + CONV_TILE - 1) / CONV_TILE;
    document = p.schedule.tile_documents[row * tiles + (slot - row * p.row_length) / CONV_TILE];
    bounds(document, start, end), bounds(document + 1, next_start, next_end);
    while (slot >= end) step();
  }
  __device__ void bounds(int d, int& a, int& b) const {
    a = d < documents ? starts[d] : 0x7fffffff, b = d < documents ? ends[d] : 0x7fffffff;
  }
  __device__ void step() { document++, start = next_start, end = next_end, bounds(document + 1, next_start, next_end); }
  __device__ void reach(int slot) {
    if (slot >= end) step();
  }
};

// A run of slots of one row, walked front to back by a block.
struct Span {
  int number, channel_block, first, end, row_end;
  __device__ explicit Span(const Spans& s) {
    number = blockIdx.x / s.channel_blocks, channel_block = blockIdx.x - number * s.channel_blocks;
    const int row = number / s.per_row;
    first = row * s.row_length + (number - row * s.per_row) * s.length, row_end = (row + 1) * s.row_length;
    end = min(first + s.length, row_end);
  }
};

// A lane's; the last lanes of the last warp do the last channels again, the same numbers to the same places. -1: none.
template <int V> __device__ __forceinline__ int first_channel(const ConvParams& p, const Span& span) {
  const int warp = span.channel_block * WARPS + (threadIdx.x >> 5), channel = (warp * 32 + (threadIdx.x & 31)) * V;
  return warp * 32 * V < p.channels ? min(channel, p.channels - V) : -1;
}

// Groups of slots on their way: a lane copies its own channels and reads nothing else, so that no barrier is needed.
template <class T, int V, int STAGES> struct Ahead {
  static constexpr int BYTES = sizeof(T) * V;
  Vector<T, V> slots[WARPS][STAGES][GROUP][32];
  __device__ T* mine() { return slots[threadIdx.x >> 5][0][0][threadIdx.x & 31].v; }
  // A group's first slot; the next is 32 V elements on.
  static __device__ T* group(T* mine, int n) { return mine + n % STAGES * (GROUP * 32 * V); }
  static __device__ void copy(T* to, const char* from) {
    const uint32_t address = __cvta_generic_to_shared(to);
    if constexpr (BYTES >= 4)
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
    else *to = *(const T*)from;
  }
  static __device__ void copy(T* to, const T* base, const View& v, int t0, int end) {
    const char* from = (const char*)base + (int64_t)t0 * v.token_bytes;
    if (t0 + GROUP <= end) {
#pragma unroll
      for (int i = 0; i < GROUP; i++) copy(to + i * 32 * V, from + (uint64_t)i * v.token_bytes);
    } else {
#pragma unroll 1
      for (int i = 0; i < end - t0; i++) copy(to + i * 32 * V, from + (uint64_t)i * v.token_bytes);
    }
  }
};
__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int STAGES> __device__ __forceinline__ void oldest_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}

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
__device__ __forceinline__ void load_weight(float (&weight)[W][V], float (&bias)[V], const ConvParams& p, int channel,
                                            float scale) {
  float rows[V * W];
  const float* from = p.weight + (int64_t)channel * W;
  if constexpr (V * W % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V * W; i += 4) load(*(float(*)[4])(rows + i), from + i);
  } else {
#pragma unroll
    for (int i = 0; i < V * W; i++) rows[i] = from[i];
  }
#pragma unroll
  for (int c = 0; c < V; c++) {
#pragma unroll
    for (int k = 0; k < W; k++) weight[k][c] = scale * rows[c * W + k];
    bias[c] = p.bias ? scale * p.bias[channel + c] : 0.f;
  }
}

// Whether vectors of so many bytes of neighbouring channels can be read.
inline bool aligned(const ConvParams& p, int bytes) {
  auto fits = [&](const View& v) {
    return (uintptr_t)v.data % bytes == 0 && v.row_bytes % bytes == 0 && v.token_bytes % bytes == 0;
  };
  return p.channels % (bytes / size_of(p.dtype)) == 0 && (uintptr_t)p.weight % 16 == 0 && fits(p.x) && fits(p.dy) &&
         ((uintptr_t)p.dx | p.dx_token * size_of(p.dtype)) % bytes == 0;
}

// Calls launch with the element type, the width, the number of channels a thread takes and the activation, as types.
template <int I> struct Int {
  static constexpr int value = I;
};
template <int BYTES, class F> void with_shape(const ConvParams& p, F launch) {
  with_dtype(p.dtype, [&](auto t) {
    auto with_silu = [&](auto width, auto vector) {
      if (p.silu) launch(t, width, vector, Int<1>());
      else launch(t, width, vector, Int<0>());
    };
    auto with_width = [&](auto vector) {
      if (p.width == 2) with_silu(Int<2>(), vector);
      else if (p.width == 3) with_silu(Int<3>(), vector);
      else with_silu(Int<4>(), vector);
    };
    if (aligned(p, BYTES)) with_width(Int<BYTES / sizeof(t)>());
    else with_width(Int<1>());
  });
}

// Spans that fill the chip in whole waves of `resident` blocks a multiprocessor. Strides have no say: they must not change a sum's order.
inline Spans spans_of(const ConvParams& p, int vector, int resident) {
  const int block = 32 * WARPS * vector;
  Spans s{(p.channels + block - 1) / block, p.rows, p.row_length};
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t wave = (int64_t)multiprocessors * resident, work = (int64_t)s.rows * s.channel_blocks;
  const int64_t waves = (work * s.row_length + wave * MAX_SPAN - 1) / (wave * MAX_SPAN);
  const int64_t parts = waves * wave / work > 1 ? waves * wave / work : 1;
  const int64_t length = (s.row_length + parts - 1) / parts;
  s.length = (int)((length > MIN_SPAN ? length : MIN_SPAN) + GROUP - 1) / GROUP * GROUP;
  s.per_row = (s.row_length + s.length - 1) / s.length;
  return s;
}

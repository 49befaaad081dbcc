// What the convolution's kernels share: vectors of channels, copies ahead, and the walk over a
// span's documents.
//
// Who holds what. A lane holds V neighbouring channels (8 bytes of them, or one channel where
// addresses are not aligned); 4 warps of a block are side by side along channels; a block walks a
// span of slots of one row front to back, in groups of 8 slots:
//
//   slots of a row     0         span 0          length          span 1          2 length
//                      | group | group | ...     | group | ...                   |
//   document             | document 0      | document 1       |  padding
//
//   channels           0        32 V      64 V      96 V      128 V
//   blockIdx.x         | warp 0  | warp 1  | warp 2  | warp 3  |        span x channel block
//                        lane l: V channels from 32 V warp + V l on
//
// The last W - 1 inputs of a lane's channels are in registers. Where documents begin is uniform
// over a block, so that a reset is a branch that all threads take together; groups in which none
// begins or ends run without looking.
//
// Shared memory: [warp][stage][slot of a group][lane], V channels each. A lane copies ahead its own
// channels and reads nothing else, so that no barrier is needed.
#pragma once
#include <type_traits>
#include "element.cuh"

constexpr int WARPS = 4;       // of a block, on neighbouring channels of one span
constexpr int MIN_SPAN = 32;   // slots
constexpr int MAX_SPAN = 256;  // slots
constexpr int GROUP = 8;       // slots that are copied and computed together; at least W - 1

// V neighbouring channels; V > 1 needs addresses that are multiples of their size.
template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
  T elements[V];
};
// The type of one access of so many bytes.
template <int BYTES>
struct Words;
template <>
struct Words<2> {
  using type = uint16_t;
};
template <>
struct Words<4> {
  using type = uint32_t;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<16> {
  using type = uint4;
};
template <class T, int V>
__device__ __forceinline__ void load(float (&x)[V], const T* from) {
  using Word = typename Words<sizeof(T) * V>::type;
  const Word words = *(const Word*)from;  // one access, which the compiler would split
  if constexpr (std::is_same<T, __nv_bfloat16>::value && V > 1) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const uint32_t pair = ((const uint32_t*)&words)[i / 2];
      x[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; i++)
      x[i] = to_float(((const T*)&words)[i]);
  }
}
template <class T, int V>
__device__ __forceinline__ void store(T* to, const float (&x)[V]) {
  Vector<T, V> vector;
#pragma unroll
  for (int i = 0; i < V; i++)
    vector.elements[i] = from_float<T>(x[i]);
  *(Vector<T, V>*)to = vector;
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
// Where a SiLU follows, weights and bias are scaled so that sums are exponents:
// sigmoid(x) = 1 / (1 + 2^(x * SILU_SCALE)).
constexpr float LN2 = 0.6931471805599453f;
constexpr float SILU_SCALE = -1 / LN2;
// sigmoid / SILU_SCALE
__device__ __forceinline__ float scaled_sigmoid(float exponent) {
  return fast_rcp(fmaf(fast_ex2(exponent), SILU_SCALE, SILU_SCALE));
}

// The document at a slot, moving forward; the next one's place is loaded ahead. Uniform over a
// warp.
struct Walk {
  const int* starts;  // (S,)
  const int* ends;    // (S,)
  int documents;      // S
  int document;
  int start;  // its first slot
  int end;    // the slot after its last
  int next_start;
  int next_end;
  __device__ Walk(const ConvParams& params, int slot)
      : starts(params.starts), ends(params.ends), documents(params.documents) {
    const int row = slot / params.row_length;
    const int tiles = (params.row_length + CONV_TILE - 1) / CONV_TILE;
    document =
        params.schedule.tile_documents[row * tiles + (slot - row * params.row_length) / CONV_TILE];
    bounds(document, start, end);
    bounds(document + 1, next_start, next_end);
    while (slot >= end)
      step();
  }
  __device__ void bounds(int index, int& start, int& end) const {
    start = index < documents ? starts[index] : 0x7fffffff;
    end = index < documents ? ends[index] : 0x7fffffff;
  }
  __device__ void step() {
    document++;
    start = next_start;
    end = next_end;
    bounds(document + 1, next_start, next_end);
  }
  __device__ void reach(int slot) {
    if (slot >= end) step();
  }
};

// A run of slots of one row, walked front to back by a block.
struct Span {
  int number;  // among all spans
  int channel_block;
  int first;    // its first slot
  int end;      // the slot after its last
  int row_end;  // the slot after its row's last
  __device__ explicit Span(const Spans& spans) {
    number = blockIdx.x / spans.channel_blocks;
    channel_block = blockIdx.x - number * spans.channel_blocks;
    const int row = number / spans.per_row;
    first = row * spans.row_length + (number - row * spans.per_row) * spans.length;
    row_end = (row + 1) * spans.row_length;
    end = min(first + spans.length, row_end);
  }
};

// The first of a lane's channels, or -1. The last lanes of the last warp do the last channels
// again, the same numbers to the same places.
template <int V>
__device__ __forceinline__ int first_channel(const ConvParams& params, const Span& span) {
  const int warp = span.channel_block * WARPS + (threadIdx.x >> 5);
  const int channel = (warp * 32 + (threadIdx.x & 31)) * V;
  return warp * 32 * V < params.channels ? min(channel, params.channels - V) : -1;
}

// Groups of slots on their way: a lane copies its own channels and reads nothing else, so that no
// barrier is needed.
template <class T, int V, int STAGES>
struct Ahead {
  static constexpr int BYTES = sizeof(T) * V;
  Vector<T, V> slots[WARPS][STAGES][GROUP][32];
  __device__ T* mine() { return slots[threadIdx.x >> 5][0][0][threadIdx.x & 31].elements; }
  // A group's first slot; the next is 32 V elements on.
  static __device__ T* group(T* mine, int number) {
    return mine + number % STAGES * (GROUP * 32 * V);
  }
  static __device__ void copy(T* to, const char* from) {
    const uint32_t address = __cvta_generic_to_shared(to);
    if constexpr (BYTES >= 4) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES)
                   : "memory");
    } else {
      *to = *(const T*)from;
    }
  }
  static __device__ void copy(T* to, const T* base, const View& view, int group_start, int end) {
    const char* from = (const char*)base + (int64_t)group_start * view.token_bytes;
    if (group_start + GROUP <= end) {
#pragma unroll
      for (int step = 0; step < GROUP; step++)
        copy(to + step * 32 * V, from + (uint64_t)step * view.token_bytes);
    } else {
#pragma unroll 1
      for (int step = 0; step < end - group_start; step++)
        copy(to + step * 32 * V, from + (uint64_t)step * view.token_bytes);
    }
  }
};
__device__ __forceinline__ void copies_issued() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int STAGES>
__device__ __forceinline__ void oldest_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}

// The W - 1 inputs before a slot of a document, oldest first: slots of the document, then its
// initial state, or zeros.
template <class T, int W, int V>
__device__ __forceinline__ void load_window(float (&window)[W - 1][V], const ConvParams& params,
                                            const Walk& walk, int slot, int channel, const T* row) {
#pragma unroll
  for (int tap = 0; tap < W - 1; tap++) {
    const int position = slot - (W - 1) + tap - walk.start;
    if (slot < walk.start) {  // padding
#pragma unroll
      for (int i = 0; i < V; i++)
        window[tap][i] = 0.f;
    } else if (position >= 0) {
      load(window[tap],
           (const T*)((const char*)row + (int64_t)(slot - (W - 1) + tap) * params.x.token_bytes));
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        window[tap][i] =
            params.initial_state
                ? params.initial_state[((int64_t)walk.document * params.channels + channel + i) *
                                           (W - 1) +
                                       W - 1 + position]
                : 0.f;
      }
    }
  }
}

// The tensor's data as if slots were counted within this row from slot 0: add slot * token_bytes.
template <class T>
__device__ __forceinline__ const T* row_base(const View& view, int slot, int row_length,
                                             int channel) {
  const int row = slot / row_length;
  return (const T*)((const char*)view.data + row * view.row_bytes -
                    (int64_t)row * row_length * view.token_bytes) +
         channel;
}
template <class T>
__device__ __forceinline__ const T* at_slot(const T* base, const View& view, int slot) {
  return (const T*)((const char*)base + (int64_t)slot * view.token_bytes);
}
template <int W, int V>
__device__ __forceinline__ void load_weight(float (&weight)[W][V], float (&bias)[V],
                                            const ConvParams& params, int channel, float scale) {
  float rows[V * W];
  const float* from = params.weight + (int64_t)channel * W;
  if constexpr (V * W % 4 == 0) {
#pragma unroll
    for (int index = 0; index < V * W; index += 4)
      load(*(float (*)[4])(rows + index), from + index);
  } else {
#pragma unroll
    for (int index = 0; index < V * W; index++)
      rows[index] = from[index];
  }
#pragma unroll
  for (int channel_offset = 0; channel_offset < V; channel_offset++) {
#pragma unroll
    for (int tap = 0; tap < W; tap++)
      weight[tap][channel_offset] = scale * rows[channel_offset * W + tap];
    bias[channel_offset] = params.bias ? scale * params.bias[channel + channel_offset] : 0.f;
  }
}

// Whether vectors of so many bytes of neighbouring channels can be read.
inline bool aligned(const ConvParams& params, int bytes) {
  auto fits = [&](const View& view) {
    return (uintptr_t)view.data % bytes == 0 && view.row_bytes % bytes == 0 &&
           view.token_bytes % bytes == 0;
  };
  return params.channels % (bytes / size_of(params.dtype)) == 0 &&
         (uintptr_t)params.weight % 16 == 0 && fits(params.x) && fits(params.dy) &&
         ((uintptr_t)params.dx | params.dx_token * size_of(params.dtype)) % bytes == 0;
}

// Calls launch with the element type, the width, the number of channels a thread takes and the
// activation, as types.
template <int VALUE>
struct Int {
  static constexpr int value = VALUE;
};
template <int BYTES, class Launch>
void with_shape(const ConvParams& params, Launch launch) {
  with_dtype(params.dtype, [&](auto type) {
    auto with_silu = [&](auto width, auto vector) {
      if (params.silu)
        launch(type, width, vector, Int<1>());
      else
        launch(type, width, vector, Int<0>());
    };
    auto with_width = [&](auto vector) {
      if (params.width == 2)
        with_silu(Int<2>(), vector);
      else if (params.width == 3)
        with_silu(Int<3>(), vector);
      else
        with_silu(Int<4>(), vector);
    };
    if (aligned(params, BYTES))
      with_width(Int<BYTES / sizeof(type)>());
    else
      with_width(Int<1>());
  });
}

// Spans that fill the chip in whole waves of `resident` blocks a multiprocessor. Strides have no
// say: they must not change a sum's order.
inline Spans spans_of(const ConvParams& params, int vector, int resident) {
  const int block_channels = 32 * WARPS * vector;
  Spans spans{(params.channels + block_channels - 1) / block_channels, params.rows,
              params.row_length};
  int device = 0;
  int multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t wave = (int64_t)multiprocessors * resident;
  const int64_t work = (int64_t)spans.rows * spans.channel_blocks;
  const int64_t waves = (work * spans.row_length + wave * MAX_SPAN - 1) / (wave * MAX_SPAN);
  const int64_t parts = waves * wave / work > 1 ? waves * wave / work : 1;
  const int64_t length = (spans.row_length + parts - 1) / parts;
  spans.length = (int)((length > MIN_SPAN ? length : MIN_SPAN) + GROUP - 1) / GROUP * GROUP;
  spans.per_row = (spans.row_length + spans.length - 1) / spans.length;
  return spans;
}

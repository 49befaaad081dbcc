// Forward of the packed depthwise convolution, and its final states:
//   y_t = act(bias + sum_k weight_k x_{t - (W - 1) + k}),  act the identity or SiLU;
// before a document's start x is its initial state, or zero.
//
// Who holds what: conv1d.cuh. A lane, with V channels of one span:
//
//   group of 8 slots     n              n + 1          n + 2          n + 3
//                        computed  ---> in shared memory, on its way (4 stages)
//   registers            weight (W V), bias (V), window: the last W - 1 inputs (V each)
//
// Spans have a length that fills the chip in whole waves of blocks. A span reads the W - 1 slots
// before it again; nothing is exchanged between spans.
//
// Shared memory: 4 stages x 8 slots x 8 bytes a lane, 32 KiB a block; six blocks a multiprocessor.
// Bound: bytes. Bytes per token and channel: x read once (and W - 1 slots a span again), y written
// once, 2 each in bfloat16.
#include "conv1d.cuh"

namespace {

constexpr int STAGES = 4;    // groups on their way or being computed
constexpr int BYTES = 8;     // of a lane's channels
constexpr int RESIDENT = 6;  // blocks of a multiprocessor

// One slot: its output, and its input into the window.
template <int W, int V, bool SILU>
__device__ __forceinline__ void output(float (&out)[V], const float (&weight)[W][V],
                                       const float (&bias)[V], float (&window)[W - 1][V],
                                       const float (&x_t)[V]) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    out[i] = fmaf(weight[W - 1][i], x_t[i], bias[i]);
#pragma unroll
    for (int tap = 0; tap < W - 1; tap++) {
      out[i] = fmaf(weight[tap][i], window[tap][i], out[i]);
      window[tap][i] = tap + 1 < W - 1 ? window[tap + 1 < W - 1 ? tap + 1 : 0][i] : x_t[i];
    }
    if (SILU) out[i] *= scaled_sigmoid(out[i]);
  }
}

template <class T, int W, int V, bool SILU>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    forward(const __grid_constant__ ConvParams params, const __grid_constant__ Spans spans) {
  __shared__ Ahead<T, V, STAGES> ahead;
  const Span span(spans);
  const int channel = first_channel<V>(params, span);
  if (channel < 0) return;
  const T* x = row_base<T>(params.x, span.first, params.row_length, channel);
  T* y = (T*)params.y + (int64_t)span.first * params.channels + channel;
  T* const mine = ahead.mine();
#pragma unroll
  for (int number = 0; number < STAGES - 1; number++) {
    ahead.copy(ahead.group(mine, number), x, params.x, span.first + number * GROUP, span.end);
    copies_issued();
  }
  Walk walk(params, span.first);
  float weight[W][V], bias[V], window[W - 1][V];
  load_weight<W, V>(weight, bias, params, channel, SILU ? SILU_SCALE : 1.f);
  load_window<T, W, V>(window, params, walk, span.first, channel, x);
  for (int number = 0, group_start = span.first; group_start < span.end;
       number++, group_start += GROUP, y += (int64_t)GROUP * params.channels) {
    ahead.copy(ahead.group(mine, number + STAGES - 1), x, params.x,
               group_start + (STAGES - 1) * GROUP, span.end);
    copies_issued();
    oldest_arrived<STAGES>();
    const T* const slots = ahead.group(mine, number);
    walk.reach(group_start);
    // No document begins in the group, but at the span's first slot, and none ends.
    if (walk.start < group_start + (group_start == span.first) &&
        group_start + GROUP <= min(walk.end, span.end)) {
#pragma unroll
      for (int step = 0; step < GROUP; step++) {
        float x_t[V], out[V];
        load(x_t, slots + step * 32 * V);
        output<W, V, SILU>(out, weight, bias, window, x_t);
        store(y + (int64_t)step * params.channels, out);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < min(GROUP, span.end - group_start); step++) {
        const int slot = group_start + step;
        walk.reach(slot);
        float x_t[V];
        float out[V] = {};
        if (slot >= walk.start) {
          load(x_t, slots + step * 32 * V);
          if (slot == walk.start && slot > span.first)
            load_window<T, W, V>(window, params, walk, slot, channel, x);
          output<W, V, SILU>(out, weight, bias, window, x_t);
        }
        store(y + (int64_t)step * params.channels, out);
      }
    }
  }
}

// One thread a document and channel; blockIdx.x channels, blockIdx.y documents. The last W - 1
// inputs of a short document are partly its initial state.
template <class T>
__global__ void final_states(const __grid_constant__ ConvParams params) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int W = params.width;
  if (channel >= params.channels) return;
  for (int document = blockIdx.y; document < params.documents; document += gridDim.y) {
    const int start = params.starts[document];
    const int length = params.ends[document] - start;
    const T* x = row_base<T>(params.x, start, params.row_length, channel);
    const int64_t state = ((int64_t)document * params.channels + channel) * (W - 1);
    for (int tap = 0; tap < W - 1; tap++) {
      const int position = length - (W - 1) + tap;
      float input = 0.f;
      if (position >= 0)
        input = to_float(*at_slot(x, params.x, start + position));
      else if (params.initial_state)
        input = params.initial_state[state + length + tap];
      params.final_state[state + tap] = input;
    }
  }
}

}  // namespace

void conv_forward(const ConvParams& params, cudaStream_t stream) {
  with_shape<BYTES>(params, [&](auto type, auto width, auto vector, auto silu) {
    constexpr int W = decltype(width)::value;
    constexpr int V = decltype(vector)::value;
    const Spans spans = spans_of(params, V, RESIDENT);
    forward<decltype(type), W, V, decltype(silu)::value>
        <<<spans.count() * spans.channel_blocks, 32 * WARPS, 0, stream>>>(params, spans);
  });
  if (params.final_state && params.documents) {
    with_dtype(params.dtype, [&](auto type) {
      const dim3 grid((params.channels + 127) / 128, min(params.documents, 65535));
      final_states<decltype(type)><<<grid, 128, 0, stream>>>(params);
    });
  }
}

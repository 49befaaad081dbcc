// Forward of the packed depthwise convolution, and its final states.
//
// Mapping: a block = a span of slots x 4 warps x 32 lanes x V neighbouring channels (8 bytes), spans of a length that fills the chip in
// whole waves. Inputs are copied ahead into shared memory, each lane its own; the last W - 1 are in registers. Document
// boundaries are uniform over the warp: groups without one run without looking.
// Bound: bytes. Bytes: x read once (and W - 1 slots a span again), y written once.
#include "conv1d.cuh"

namespace {

constexpr int STAGES = 4, BYTES = 8, RESIDENT = 6;  // blocks of a multiprocessor

template <int W, int V, bool SILU>
__device__ __forceinline__ void output(float (&out)[V], const float (&weight)[W][V], const float (&bias)[V],
                                       float (&window)[W - 1][V], const float (&now)[V]) {
#pragma unroll
  for (int c = 0; c < V; c++) {
    out[c] = fmaf(weight[W - 1][c], now[c], bias[c]);
#pragma unroll
    for (int k = 0; k < W - 1; k++) {
      out[c] = fmaf(weight[k][c], window[k][c], out[c]);
      window[k][c] = k + 1 < W - 1 ? window[k + 1 < W - 1 ? k + 1 : 0][c] : now[c];
    }
    if (SILU) out[c] *= scaled_sigmoid(out[c]);
  }
}

template <class T, int W, int V, bool SILU>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    forward(const __grid_constant__ ConvParams p, const __grid_constant__ Spans spans) {
  __shared__ Ahead<T, V, STAGES> ahead;
  const Span span(spans);
  const int channel = first_channel<V>(p, span);
  if (channel < 0) return;
  const T* x = row_base<T>(p.x, span.first, p.row_length, channel);
  T* y = (T*)p.y + (int64_t)span.first * p.channels + channel;
  T* const mine = ahead.mine();
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++)
    ahead.copy(ahead.group(mine, n), x, p.x, span.first + n * GROUP, span.end), copies_issued();
  Walk walk(p, span.first);
  float weight[W][V], bias[V], window[W - 1][V];
  load_weight<W, V>(weight, bias, p, channel, SILU ? SILU_SCALE : 1.f);
  load_window<T, W, V>(window, p, walk, span.first, channel, x);
  for (int n = 0, t0 = span.first; t0 < span.end; n++, t0 += GROUP, y += (int64_t)GROUP * p.channels) {
    ahead.copy(ahead.group(mine, n + STAGES - 1), x, p.x, t0 + (STAGES - 1) * GROUP, span.end), copies_issued();
    oldest_arrived<STAGES>();
    const T* const slots = ahead.group(mine, n);
    walk.reach(t0);
    if (walk.start < t0 + (t0 == span.first) && t0 + GROUP <= min(walk.end, span.end)) {
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float now[V], out[V];
        load(now, slots + i * 32 * V);
        output<W, V, SILU>(out, weight, bias, window, now);
        store(y + (int64_t)i * p.channels, out);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < min(GROUP, span.end - t0); i++) {
        const int t = t0 + i;
        walk.reach(t);
        float now[V], out[V] = {};
        if (t >= walk.start) {
          load(now, slots + i * 32 * V);
          if (t == walk.start && t > span.first) load_window<T, W, V>(window, p, walk, t, channel, x);
          output<W, V, SILU>(out, weight, bias, window, now);
        }
        store(y + (int64_t)i * p.channels, out);
      }
    }
  }
}

// One thread a document and channel.
template <class T> __global__ void final_states(const __grid_constant__ ConvParams p) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, W = p.width;
  if (channel >= p.channels) return;
  for (int d = blockIdx.y; d < p.documents; d += gridDim.y) {
    const int start = p.starts[d], length = p.ends[d] - start;
    const T* x = row_base<T>(p.x, start, p.row_length, channel);
    const int64_t state = ((int64_t)d * p.channels + channel) * (W - 1);
    for (int k = 0; k < W - 1; k++) {
      const int place = length - (W - 1) + k;
      float v = 0.f;
      if (place >= 0) v = to_float(*at_slot(x, p.x, start + place));
      else if (p.initial_state) v = p.initial_state[state + length + k];
      p.final_state[state + k] = v;
    }
  }
}

}  // namespace

void conv_forward(const ConvParams& p, cudaStream_t stream) {
  with_shape<BYTES>(p, [&](auto t, auto width, auto vector, auto silu) {
    constexpr int W = decltype(width)::value, V = decltype(vector)::value;
    const Spans spans = spans_of(p, V, RESIDENT);
    forward<decltype(t), W, V, decltype(silu)::value><<<spans.count() * spans.channel_blocks, 32 * WARPS, 0, stream>>>(p, spans);
  });
  if (p.final_state && p.documents)
    with_dtype(p.dtype, [&](auto t) {
      const dim3 grid((p.channels + 127) / 128, min(p.documents, 65535));
      final_states<decltype(t)><<<grid, 128, 0, stream>>>(p);
    });
}

// Backward of the packed depthwise convolution.
//
// Mapping: as the forward, spans walked forward; the pre-activation is computed again; g, its gradient, stays in registers for W
// slots, and an input's gradient is whole W - 1 slots later. Past its end a span goes on for W - 1 slots of the same document to
// finish its own. dweight and dbias: in registers over a span, over spans by a second kernel, in a fixed order: no atomics.
// Bound: bytes. Bytes: x and dy read once (and 2 (W - 1) slots a span again), dx written once, 20 a span of partials.
#include "conv1d.cuh"

namespace {

constexpr int STAGES = 2, BYTES = 8, RESIDENT = 4;  // blocks of a multiprocessor

// One slot: g from its pre-activation, then the gradient of the input W - 1 slots before, and, of own slots, of the parameters.
template <int W, int V, bool SILU> struct Slot {
  float weight[W][V], bias[V], x[W - 1][V], g[W - 1][V], dweight[W][V] = {}, dbias[V] = {};  // x, g: of the last W - 1 slots

  __device__ __forceinline__ void advance(float (&dx)[V], const float (&now)[V], const float (&dy)[V], bool own) {
#pragma unroll
    for (int c = 0; c < V; c++) {
      float gt = dy[c];  // over SILU_SCALE, as dweight and dbias: dx has the scaled weights
      if (SILU) {
        float pre = fmaf(weight[W - 1][c], now[c], bias[c]);
#pragma unroll
        for (int k = 0; k < W - 1; k++) pre = fmaf(weight[k][c], x[k][c], pre);
        const float s = scaled_sigmoid(pre);
        gt *= s * fmaf(pre, -LN2 - s, 1.f);
      }
      if (own) {
        dbias[c] += gt;
        dweight[W - 1][c] = fmaf(gt, now[c], dweight[W - 1][c]);
#pragma unroll
        for (int k = 0; k < W - 1; k++) dweight[k][c] = fmaf(gt, x[k][c], dweight[k][c]);
      }
      retire(dx, gt, now[c], c);
    }
  }
  __device__ __forceinline__ void retire(float (&dx)[V], float gt, float now, int c) {
    dx[c] = weight[0][c] * gt;
#pragma unroll
    for (int k = 0; k < W - 1; k++) {
      dx[c] = fmaf(weight[W - 1 - k][c], g[k][c], dx[c]);
      const int n = k + 1 < W - 1 ? k + 1 : 0;
      g[k][c] = k + 1 < W - 1 ? g[n][c] : gt, x[k][c] = k + 1 < W - 1 ? x[n][c] : now;
    }
  }
};

template <int W, int V> __device__ __forceinline__ void clear(float (&v)[W][V]) {
#pragma unroll
  for (int k = 0; k < W; k++)
#pragma unroll
    for (int c = 0; c < V; c++) v[k][c] = 0.f;
}

template <class T, int W, int V, bool SILU>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    backward(const __grid_constant__ ConvParams p, const __grid_constant__ Spans spans) {
  __shared__ Ahead<T, V, STAGES> ahead_x, ahead_dy;
  let_next_start();
  const Span span(spans);
  const int channel = first_channel<V>(p, span);
  if (channel < 0) return;
  const T* x = row_base<T>(p.x, span.first, p.row_length, channel);
  const T* dy = row_base<T>(p.dy, span.first, p.row_length, channel);
  T* dx = (T*)p.dx + channel;
  const int stop = min(span.end + W - 1, span.row_end);
  T *const mine_x = ahead_x.mine(), *const mine_dy = ahead_dy.mine();
  auto copy = [&](int n, int t0) {
    ahead_x.copy(ahead_x.group(mine_x, n), x, p.x, t0, stop), ahead_dy.copy(ahead_dy.group(mine_dy, n), dy, p.dy, t0, stop);
    copies_issued();
  };
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) copy(n, span.first + n * GROUP);
  Walk walk(p, span.first);
  constexpr float SCALE = SILU ? SILU_SCALE : 1.f;
  Slot<W, V, SILU> slot;
  load_weight<W, V>(slot.weight, slot.bias, p, channel, SCALE);
  load_window<T, W, V>(slot.x, p, walk, span.first, channel, x);
  auto finish = [&](float (&v)[V], int t) {  // a slot whose sum is whole, if it is this span's
    if (t < span.first || t >= span.end || t < walk.start) return;
    const int k = t - (walk.end - (W - 1));
    if (p.dfinal && k >= 0)
#pragma unroll
      for (int c = 0; c < V; c++) v[c] += p.dfinal[((int64_t)walk.document * p.channels + channel + c) * (W - 1) + k];
    store(dx + (int64_t)t * p.dx_token, v);
  };
  for (int n = 0, t0 = span.first; t0 < stop; n++, t0 += GROUP) {
    copy(n + STAGES - 1, t0 + (STAGES - 1) * GROUP);
    oldest_arrived<STAGES>();
    const T *const slots_x = ahead_x.group(mine_x, n), *const slots_dy = ahead_dy.group(mine_dy, n);
    if (t0 < span.end) walk.reach(t0);
    const bool opens = t0 == span.first;  // inputs before it are another span's
    const int whole_from = opens ? t0 : t0 - (W - 1);
    if (walk.start <= whole_from && t0 + GROUP <= min(span.end, walk.end - (W - 1))) {
      if (opens) clear(slot.g);
      T* to = dx + (int64_t)(t0 - (W - 1)) * p.dx_token;
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float now[V], gy[V], whole[V];
        load(now, slots_x + i * 32 * V), load(gy, slots_dy + i * 32 * V);
        slot.advance(whole, now, gy, true);
        if (i >= W - 1 || !opens) store(to + (int64_t)i * p.dx_token, whole);
      }
      continue;
    }
#pragma unroll 1
    for (int t = t0; t < min(t0 + GROUP, stop); t++) {
      if (t < span.end) walk.reach(t);
      // Past the end: what the next slots of the last document owe the span's last.
      else if (t >= walk.end || walk.start >= span.end) break;
      float now[V], gy[V], whole[V] = {};
      if (t < walk.start) {  // padding
        store(dx + (int64_t)t * p.dx_token, whole);
        continue;
      }
      load(now, slots_x + (t - t0) * 32 * V), load(gy, slots_dy + (t - t0) * 32 * V);
      if (t == walk.start && t > span.first) load_window<T, W, V>(slot.x, p, walk, t, channel, x);
      if (t == walk.start || t == span.first) clear(slot.g);
      slot.advance(whole, now, gy, t < span.end);
      finish(whole, t - (W - 1));
      if (t == walk.end - 1)
        for (int k = 0; k < W - 1; k++) {
#pragma unroll
          for (int c = 0; c < V; c++) slot.retire(whole, 0.f, 0.f, c);
          finish(whole, t - (W - 2) + k);
        }
    }
  }
  float* const partial = p.partial + (int64_t)span.number * (W + 1) * p.channels + channel;
#pragma unroll
  for (int k = 0; k <= W; k++) {
    float v[V];
#pragma unroll
    for (int c = 0; c < V; c++) v[c] = SCALE * (k < W ? slot.dweight[k < W ? k : 0][c] : slot.dbias[c]);
    store(partial + (int64_t)k * p.channels, v);
  }
}

constexpr int SLICES = 8;

// One column a tap (or bias) and channel, over the spans: each of SLICES threads its own, then those in order.
__global__ void __launch_bounds__(32 * SLICES) reduce(const __grid_constant__ ConvParams p, int spans) {
  __shared__ float sums[SLICES][32];
  wait_for_previous();
  const int64_t i = (int64_t)blockIdx.x * 32 + threadIdx.x, stride = (int64_t)(p.width + 1) * p.channels;
  float v = 0.f;
  if (i < stride)
#pragma unroll 16
    for (int b = threadIdx.y; b < spans; b += SLICES) v += p.partial[b * stride + i];
  sums[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.y || i >= stride) return;
  for (int s = 1; s < SLICES; s++) v += sums[s][threadIdx.x];
  const int k = i / p.channels, channel = i % p.channels;
  if (k < p.width) p.dweight[(int64_t)channel * p.width + k] = v;
  else if (p.dbias) p.dbias[channel] = v;
}

// One thread a document and channel: g of its first W - 1 slots, and a short document's part of the final state.
template <class T> __global__ void initial_states(const __grid_constant__ ConvParams p) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, W = p.width;
  if (channel >= p.channels) return;
  float weight[4];
  for (int k = 0; k < W; k++) weight[k] = p.weight[(int64_t)channel * W + k];
  for (int d = blockIdx.y; d < p.documents; d += gridDim.y) {
    const int start = p.starts[d], length = p.ends[d] - start;
    const T* x = row_base<T>(p.x, start, p.row_length, channel);
    const T* dy = row_base<T>(p.dy, start, p.row_length, channel);
    const int64_t state = ((int64_t)d * p.channels + channel) * (W - 1);
    float out[3] = {};
    for (int t = 0; t < min(length, W - 1); t++) {
      float g = to_float(*at_slot(dy, p.dy, start + t));
      if (p.silu) {
        float pre = p.bias ? p.bias[channel] : 0.f;
        for (int k = 0; k < W; k++) {
          const int place = t - (W - 1) + k;
          const float v = place >= 0 ? to_float(*at_slot(x, p.x, start + place))
                                     : p.initial_state[state + W - 1 + place];
          pre = fmaf(weight[k], v, pre);
        }
        const float s = fast_rcp(1.f + fast_ex2(pre * SILU_SCALE));
        g *= s * fmaf(pre, 1.f - s, 1.f);
      }
      for (int k = t; k < W - 1; k++) out[k] = fmaf(weight[k - t], g, out[k]);
    }
    for (int k = 0; k < W - 1; k++) {
      if (p.dfinal && k >= length) out[k] += p.dfinal[state + k - length];
      p.dinitial[state + k] = out[k];
    }
  }
}

}  // namespace

int64_t conv_partials(const ConvParams& p) {
  const int vector = aligned(p, BYTES) ? BYTES / size_of(p.dtype) : 1;
  return spans_of(p, vector, RESIDENT).count() * (p.width + 1) * p.channels;
}

void conv_backward(const ConvParams& p, cudaStream_t stream) {
  int64_t count = 0;
  with_shape<BYTES>(p, [&](auto t, auto width, auto vector, auto silu) {
    constexpr int W = decltype(width)::value, V = decltype(vector)::value;
    const Spans spans = spans_of(p, V, RESIDENT);
    count = spans.count();
    backward<decltype(t), W, V, decltype(silu)::value><<<count * spans.channel_blocks, 32 * WARPS, 0, stream>>>(p, spans);
  });
  const int64_t sums = (int64_t)(p.width + 1) * p.channels;
  launch_behind(reduce, (sums + 31) / 32, dim3(32, SLICES), 0, stream, p, count);
  if (p.dinitial && p.documents)
    with_dtype(p.dtype, [&](auto t) {
      const dim3 grid((p.channels + 127) / 128, min(p.documents, 65535));
      initial_states<decltype(t)><<<grid, 128, 0, stream>>>(p);
    });
}

// Backward of the packed depthwise convolution. With
//   pre_t = bias + sum_k weight_k x_{t - (W - 1) + k}
// and g_t = dy_t act'(pre_t), its gradient:
//   dx_t = sum_k weight_k g_{t + (W - 1) - k};  dweight_k = sum_t g_t x_{t - (W - 1) + k};
//   dbias = sum_t g_t.
//
// Who holds what: conv1d.cuh; spans are walked forward, as in the forward.
//
//   slot of a document   t - 3     t - 2     t - 1     t              W = 4
//   registers            x, g      x, g      x, g      x, dy arrive; pre and g are computed
//   dx                   whole: stored                 begun
//
// g stays in registers for W - 1 slots, and an input's gradient is whole W - 1 slots later. Past
// its end a span goes on for W - 1 slots of the same document to finish its own. dweight and dbias:
// in registers over a span, over spans by `reduce`, in a fixed order: no atomics.
//
// Shared memory: x and dy, 2 stages x 8 slots x 8 bytes a lane each, 32 KiB a block; four blocks a
// multiprocessor.
// Bound: bytes. Bytes per token and channel: x and dy read once (and 2 (W - 1) slots a span again),
// dx written once, 2 each in bfloat16; 4 (W + 1) a span and channel of partials, 20 for W = 4.
#include "conv1d.cuh"

namespace {

constexpr int STAGES = 2;    // groups on their way or being computed
constexpr int BYTES = 8;     // of a lane's channels
constexpr int RESIDENT = 4;  // blocks of a multiprocessor

// One slot after another: g from the pre-activation, then the gradient of the input W - 1 slots
// before, and, of own slots, of the parameters.
template <int W, int V, bool SILU>
struct Running {
  float weight[W][V];  // times SILU_SCALE where a SiLU follows
  float bias[V];       // the same
  float x[W - 1][V];   // of the last W - 1 slots, oldest first
  float g[W - 1][V];   // the same
  float dweight[W][V] = {};
  float dbias[V] = {};

  __device__ __forceinline__ void advance(float (&dx)[V], const float (&x_t)[V],
                                          const float (&dy_t)[V], bool own) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      float g_t = dy_t[i];  // over SILU_SCALE, as dweight and dbias: dx has the scaled weights
      if (SILU) {
        float pre = fmaf(weight[W - 1][i], x_t[i], bias[i]);
#pragma unroll
        for (int tap = 0; tap < W - 1; tap++)
          pre = fmaf(weight[tap][i], x[tap][i], pre);
        const float sigmoid = scaled_sigmoid(pre);
        g_t *= sigmoid * fmaf(pre, -LN2 - sigmoid, 1.f);
      }
      if (own) {
        dbias[i] += g_t;
        dweight[W - 1][i] = fmaf(g_t, x_t[i], dweight[W - 1][i]);
#pragma unroll
        for (int tap = 0; tap < W - 1; tap++)
          dweight[tap][i] = fmaf(g_t, x[tap][i], dweight[tap][i]);
      }
      retire(dx, g_t, x_t[i], i);
    }
  }
  // Adds g_t to the sums of inputs' gradients; dx is that of the slot W - 1 before, now whole.
  __device__ __forceinline__ void retire(float (&dx)[V], float g_t, float x_t, int i) {
    dx[i] = weight[0][i] * g_t;
#pragma unroll
    for (int tap = 0; tap < W - 1; tap++) {
      dx[i] = fmaf(weight[W - 1 - tap][i], g[tap][i], dx[i]);
      const int next = tap + 1 < W - 1 ? tap + 1 : 0;
      g[tap][i] = tap + 1 < W - 1 ? g[next][i] : g_t;
      x[tap][i] = tap + 1 < W - 1 ? x[next][i] : x_t;
    }
  }
};

template <int W, int V>
__device__ __forceinline__ void clear(float (&values)[W][V]) {
#pragma unroll
  for (int tap = 0; tap < W; tap++)
#pragma unroll
    for (int i = 0; i < V; i++)
      values[tap][i] = 0.f;
}

template <class T, int W, int V, bool SILU>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    backward(const __grid_constant__ ConvParams params, const __grid_constant__ Spans spans) {
  __shared__ Ahead<T, V, STAGES> ahead_x, ahead_dy;
  let_next_start();
  const Span span(spans);
  const int channel = first_channel<V>(params, span);
  if (channel < 0) return;
  const T* x = row_base<T>(params.x, span.first, params.row_length, channel);
  const T* dy = row_base<T>(params.dy, span.first, params.row_length, channel);
  T* dx = (T*)params.dx + channel;
  const int stop = min(span.end + W - 1, span.row_end);
  T* const mine_x = ahead_x.mine();
  T* const mine_dy = ahead_dy.mine();
  auto copy = [&](int number, int group_start) {
    ahead_x.copy(ahead_x.group(mine_x, number), x, params.x, group_start, stop);
    ahead_dy.copy(ahead_dy.group(mine_dy, number), dy, params.dy, group_start, stop);
    copies_issued();
  };
#pragma unroll
  for (int number = 0; number < STAGES - 1; number++)
    copy(number, span.first + number * GROUP);
  Walk walk(params, span.first);
  constexpr float SCALE = SILU ? SILU_SCALE : 1.f;
  Running<W, V, SILU> running;
  load_weight<W, V>(running.weight, running.bias, params, channel, SCALE);
  load_window<T, W, V>(running.x, params, walk, span.first, channel, x);
  // Stores a slot whose sum is whole, if it is this span's.
  auto finish = [&](float (&dx_t)[V], int slot) {
    if (slot < span.first || slot >= span.end || slot < walk.start) return;
    const int tap = slot - (walk.end - (W - 1));
    if (params.dfinal && tap >= 0)
#pragma unroll
      for (int i = 0; i < V; i++)
        dx_t[i] +=
            params.dfinal[((int64_t)walk.document * params.channels + channel + i) * (W - 1) + tap];
    store(dx + (int64_t)slot * params.dx_token, dx_t);
  };
  for (int number = 0, group_start = span.first; group_start < stop;
       number++, group_start += GROUP) {
    copy(number + STAGES - 1, group_start + (STAGES - 1) * GROUP);
    oldest_arrived<STAGES>();
    const T* const slots_x = ahead_x.group(mine_x, number);
    const T* const slots_dy = ahead_dy.group(mine_dy, number);
    if (group_start < span.end) walk.reach(group_start);
    const bool opens = group_start == span.first;  // inputs before it are another span's
    const int whole_from = opens ? group_start : group_start - (W - 1);
    if (walk.start <= whole_from && group_start + GROUP <= min(span.end, walk.end - (W - 1))) {
      if (opens) clear(running.g);
      T* to = dx + (int64_t)(group_start - (W - 1)) * params.dx_token;
#pragma unroll
      for (int step = 0; step < GROUP; step++) {
        float x_t[V], dy_t[V], whole[V];
        load(x_t, slots_x + step * 32 * V);
        load(dy_t, slots_dy + step * 32 * V);
        running.advance(whole, x_t, dy_t, true);
        if (step >= W - 1 || !opens) store(to + (int64_t)step * params.dx_token, whole);
      }
      continue;
    }
#pragma unroll 1
    for (int slot = group_start; slot < min(group_start + GROUP, stop); slot++) {
      if (slot < span.end) {
        walk.reach(slot);
      }
      // Past the end: what the next slots of the last document owe the span's last.
      else if (slot >= walk.end || walk.start >= span.end) {
        break;
      }
      float x_t[V];
      float dy_t[V];
      float whole[V] = {};
      if (slot < walk.start) {  // padding
        store(dx + (int64_t)slot * params.dx_token, whole);
        continue;
      }
      load(x_t, slots_x + (slot - group_start) * 32 * V);
      load(dy_t, slots_dy + (slot - group_start) * 32 * V);
      if (slot == walk.start && slot > span.first)
        load_window<T, W, V>(running.x, params, walk, slot, channel, x);
      if (slot == walk.start || slot == span.first) clear(running.g);
      running.advance(whole, x_t, dy_t, slot < span.end);
      finish(whole, slot - (W - 1));
      if (slot == walk.end - 1) {
        for (int tap = 0; tap < W - 1; tap++) {
#pragma unroll
          for (int i = 0; i < V; i++)
            running.retire(whole, 0.f, 0.f, i);
          finish(whole, slot - (W - 2) + tap);
        }
      }
    }
  }
  float* const partial =
      params.partial + (int64_t)span.number * (W + 1) * params.channels + channel;
#pragma unroll
  for (int tap = 0; tap <= W; tap++) {
    float sums[V];
#pragma unroll
    for (int i = 0; i < V; i++)
      sums[i] = SCALE * (tap < W ? running.dweight[tap < W ? tap : 0][i] : running.dbias[i]);
    store(partial + (int64_t)tap * params.channels, sums);
  }
}

constexpr int SLICES = 8;  // threads of a column

// One column a tap (or bias) and channel, over the spans: each of SLICES threads its own, then
// those in order.
__global__ void __launch_bounds__(32 * SLICES)
    reduce(const __grid_constant__ ConvParams params, int spans) {
  __shared__ float sums[SLICES][32];
  wait_for_previous();
  const int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x;
  const int64_t stride = (int64_t)(params.width + 1) * params.channels;
  float sum = 0.f;
  if (column < stride)
#pragma unroll 16
    for (int span = threadIdx.y; span < spans; span += SLICES)
      sum += params.partial[span * stride + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= stride) return;
  for (int slice = 1; slice < SLICES; slice++)
    sum += sums[slice][threadIdx.x];
  const int tap = column / params.channels;
  const int channel = column % params.channels;
  if (tap < params.width)
    params.dweight[(int64_t)channel * params.width + tap] = sum;
  else if (params.dbias)
    params.dbias[channel] = sum;
}

// One thread a document and channel; blockIdx.x channels, blockIdx.y documents: g of its first W -
// 1 slots, and a short document's part of the final state.
template <class T>
__global__ void initial_states(const __grid_constant__ ConvParams params) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int W = params.width;
  if (channel >= params.channels) return;
  float weight[4];
  for (int tap = 0; tap < W; tap++)
    weight[tap] = params.weight[(int64_t)channel * W + tap];
  for (int document = blockIdx.y; document < params.documents; document += gridDim.y) {
    const int start = params.starts[document];
    const int length = params.ends[document] - start;
    const T* x = row_base<T>(params.x, start, params.row_length, channel);
    const T* dy = row_base<T>(params.dy, start, params.row_length, channel);
    const int64_t state = ((int64_t)document * params.channels + channel) * (W - 1);
    float out[3] = {};
    for (int token = 0; token < min(length, W - 1); token++) {
      float g = to_float(*at_slot(dy, params.dy, start + token));
      if (params.silu) {
        float pre = params.bias ? params.bias[channel] : 0.f;
        for (int tap = 0; tap < W; tap++) {
          const int position = token - (W - 1) + tap;
          const float input = position >= 0 ? to_float(*at_slot(x, params.x, start + position))
                                            : params.initial_state[state + W - 1 + position];
          pre = fmaf(weight[tap], input, pre);
        }
        const float sigmoid = fast_rcp(1.f + fast_ex2(pre * SILU_SCALE));
        g *= sigmoid * fmaf(pre, 1.f - sigmoid, 1.f);
      }
      for (int tap = token; tap < W - 1; tap++)
        out[tap] = fmaf(weight[tap - token], g, out[tap]);
    }
    for (int tap = 0; tap < W - 1; tap++) {
      if (params.dfinal && tap >= length) out[tap] += params.dfinal[state + tap - length];
      params.dinitial[state + tap] = out[tap];
    }
  }
}

}  // namespace

int64_t conv_partials(const ConvParams& params) {
  const int vector = aligned(params, BYTES) ? BYTES / size_of(params.dtype) : 1;
  return spans_of(params, vector, RESIDENT).count() * (params.width + 1) * params.channels;
}

void conv_backward(const ConvParams& params, cudaStream_t stream) {
  int64_t count = 0;
  with_shape<BYTES>(params, [&](auto type, auto width, auto vector, auto silu) {
    constexpr int W = decltype(width)::value;
    constexpr int V = decltype(vector)::value;
    const Spans spans = spans_of(params, V, RESIDENT);
    count = spans.count();
    backward<decltype(type), W, V, decltype(silu)::value>
        <<<count * spans.channel_blocks, 32 * WARPS, 0, stream>>>(params, spans);
  });
  const int64_t sums = (int64_t)(params.width + 1) * params.channels;
  launch_behind(reduce, (sums + 31) / 32, dim3(32, SLICES), 0, stream, params, count);
  if (params.dinitial && params.documents) {
    with_dtype(params.dtype, [&](auto type) {
      const dim3 grid((params.channels + 127) / 128, min(params.documents, 65535));
      initial_states<decltype(type)><<<grid, 128, 0, stream>>>(params);
    });
  }
}

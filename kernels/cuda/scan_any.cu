// The selective scan for any activations and any number of states up to 256, in float32: right first, and simple.
//
// Mapping: G lanes a channel, G the power of two with 8 G >= N; lane j holds states j, j + G, ...: at most 8 recurrences in
// registers, one item of the schedule a block, sequential over tokens. The backward walks chunks of 64 tokens back: a replay from
// the saved state keeps every eighth state, a second one keeps 8 tokens' states, in shared memory. dB and dC are summed over a warp's
// channels by a transposing butterfly, over warps in shared memory, over the block's passes in its own partial.
// Bound: issue; about 15 instructions forward and 60 backward per token, channel and state.
// Bytes: as scan16's, with 4 N / 64 for saved states.
#include "element.cuh"

namespace {

constexpr int EACH = 8;    // states of a lane
constexpr int STEPS = 8;   // tokens whose states shared memory holds
constexpr int CHUNK = 64;  // tokens between saved states
constexpr int MIN_CHANNELS = 64;  // of a block of the backward, in as many passes as it takes: bounds the partials

struct Group {  // G lanes of one channel
  int G, j, warp_channels, block_channels;
  __device__ explicit Group(int states) {
    G = 1;
    while (G * EACH < states) G *= 2;
    j = threadIdx.x & (G - 1);
    warp_channels = 32 / G, block_channels = blockDim.x / G;
  }
  __device__ float sum(float v) const {
    for (int d = 1; d < G; d *= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
  }
};

__device__ float step_size(float x, bool softplus) { return !softplus || x > 20.f ? x : log1pf(expf(x)); }
__device__ float logistic(float x) { return 1.f / (1.f + expf(-x)); }

// Channel-wise facts and the tensors of one segment, for one lane.
template <class T> struct Channel {
  const ScanParams& p;
  const T *u, *delta, *z, *dy, *B, *C;
  float A[EACH], bias, D;
  int states, j, G, channel;
  bool live;
  __device__ Channel(const ScanParams& p, const Group& group, int channel)
      : p(p), states(p.states), j(group.j), G(group.G), channel(min(channel, p.channels - 1)), live(channel < p.channels) {
    for_states([&](int i, int n) { A[i] = p.A[(int64_t)this->channel * states + n]; }, A);
    bias = p.bias ? p.bias[this->channel] : 0.f, D = p.D ? p.D[this->channel] : 0.f;
  }
  template <class F> __device__ void for_states(F f, float (&otherwise)[EACH]) const {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      otherwise[i] = 0.f;
      if (i * G + j < states) f(i, i * G + j);
    }
  }
  __device__ void load(float (&h)[EACH], const float* states_of, int64_t which) const {
    for_states([&](int i, int n) { h[i] = states_of[(which * p.channels + channel) * states + n]; }, h);
  }
  __device__ void store(const float (&h)[EACH], float* states_of, int64_t which) const {
    if (!live) return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * G + j < states) states_of[(which * p.channels + channel) * states + i * G + j] = h[i];
  }
  __device__ void enter(int slot) {
    u = element_at<T>(p.u, slot, p.row_length, channel), delta = element_at<T>(p.delta, slot, p.row_length, channel);
    if (p.z.data) z = element_at<T>(p.z, slot, p.row_length, channel);
    if (p.dy.data) dy = element_at<T>(p.dy, slot, p.row_length, channel);
    B = element_at<T>(p.B, slot, p.row_length, 0), C = element_at<T>(p.C, slot, p.row_length, 0);
  }
  __device__ void row(float (&v)[EACH], const T* first, const View& view, int t) const {
    for_states([&](int i, int n) { v[i] = later(first + n, view, t); }, v);
  }
  __device__ float step(int t) const { return step_size(later(delta, p.delta, t) + bias, p.softplus); }
  __device__ void advance(float (&h)[EACH], int t) const {
    const float e = step(t), w = e * later(u, p.u, t);
    float b[EACH];
    row(b, B, p.B, t);
#pragma unroll
    for (int i = 0; i < EACH; i++) h[i] = fmaf(h[i], expf(e * A[i]), w * b[i]);
  }
  __device__ int64_t saved(int document_start, int place) const { return document_start / CHUNK + place / CHUNK - 1; }
};

template <class T> __global__ void forward(const __grid_constant__ ScanParams p) {
  if (blockIdx.y >= p.schedule.counts[0]) return;
  const Group group(p.states);
  Channel<T> c(p, group, blockIdx.x * group.block_channels + threadIdx.x / group.G);
  const int2 item = p.schedule.items[blockIdx.y];
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = p.schedule.segments[i];
    float h[EACH] = {};
    if (p.initial_state) c.load(h, p.initial_state, document_of(segment));
    c.enter(segment.x);
    for (int t = 0; t < segment.y - segment.x; t++) {
      if (p.saved && t % CHUNK == 0 && t > 0) c.store(h, (float*)p.saved, c.saved(segment.x, t));
      c.advance(h, t);
      float C[EACH], y = 0.f;
      c.row(C, c.C, p.C, t);
#pragma unroll
      for (int n = 0; n < EACH; n++) y = fmaf(h[n], C[n], y);
      y = fmaf(c.D, later(c.u, p.u, t), group.sum(y));
      if (p.z.data) {
        const float z = later(c.z, p.z, t);
        y *= z * logistic(z);
      }
      if (c.live && c.j == 0) ((T*)p.y)[(int64_t)(segment.x + t) * p.channels + c.channel] = from_float<T>(y);
    }
    if (p.final_state) c.store(h, p.final_state, document_of(segment));
  }
}

// Sums 16 values over the lanes that hold the same states: each step halves the values a lane holds, and doubles the lanes they
// are summed over. A lane then holds v[0 ... kept - 1], numbers first ... of the 16.
template <int HALF> __device__ void halve(float (&v)[16], int mask, bool active, int& first) {
  if (!active) return;
  const bool upper = threadIdx.x & mask;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float keep = upper ? v[HALF + i] : v[i], give = upper ? v[i] : v[HALF + i];
    v[i] = keep + __shfl_xor_sync(~0u, give, mask);
  }
  first += upper ? HALF : 0;
}

template <class T> __global__ void backward(const __grid_constant__ ScanParams p) {
  extern __shared__ float shared[];
  if (blockIdx.y >= p.schedule.counts[0]) return;
  const Group group(p.states);
  const int G = group.G, threads = blockDim.x, columns = 2 * EACH * G, w = threadIdx.x >> 5, warps = threads / 32;
  float* const starts = shared + threadIdx.x;                          // [CHUNK / STEPS][EACH][thread]
  float* const history = starts + CHUNK / STEPS * EACH * threads;      // [STEPS][EACH][thread]: states after a token
  float* const sums = shared + (CHUNK / STEPS + STEPS) * EACH * threads;  // [warp][STEPS][columns]
  const int block_channels = max(MIN_CHANNELS, group.block_channels);
  const int2 item = p.schedule.items[blockIdx.y];
  for (int pass = 0; pass * group.block_channels < block_channels; pass++) {
    Channel<T> c(p, group, blockIdx.x * block_channels + pass * group.block_channels + threadIdx.x / G);
    float dA[EACH] = {}, dD = 0.f, dbias = 0.f;
    for (int i = item.y - 1; i >= item.x; i--) {
      const int4 segment = p.schedule.segments[i];
      const int length = segment.y - segment.x;
      float carry[EACH] = {};
      if (p.dfinal && c.live) c.load(carry, p.dfinal, document_of(segment));
      c.enter(segment.x);
      for (int c0 = (length - 1) / CHUNK * CHUNK; c0 >= 0; c0 -= CHUNK) {
        const int end = min(length, c0 + CHUNK);
        float h[EACH] = {};
        if (c0 > 0) c.load(h, (const float*)p.saved, c.saved(segment.x, c0));
        else if (p.initial_state) c.load(h, p.initial_state, document_of(segment));
        for (int t = c0; t < end; t++) {
          if ((t - c0) % STEPS == 0)
#pragma unroll
            for (int n = 0; n < EACH; n++) starts[((t - c0) / STEPS * EACH + n) * threads] = h[n];
          if ((t - c0) / STEPS < (end - 1 - c0) / STEPS) c.advance(h, t);
        }
        for (int t0 = c0 + (end - 1 - c0) / STEPS * STEPS; t0 >= c0; t0 -= STEPS) {
          const float* start = starts + (t0 - c0) / STEPS * EACH * threads;
          const int t1 = min(end, t0 + STEPS);
#pragma unroll
          for (int n = 0; n < EACH; n++) h[n] = start[n * threads];
          for (int t = t0; t < t1; t++) {
            c.advance(h, t);
#pragma unroll
            for (int n = 0; n < EACH; n++) history[((t - t0) * EACH + n) * threads] = h[n];
          }
          __syncthreads();  // the last sums have been read
          for (int t = t1 - 1; t >= t0; t--) {
            const float x = later(c.delta, p.delta, t) + c.bias, e = step_size(x, p.softplus), u = later(c.u, p.u, t);
            const float slope = p.softplus ? logistic(x) : 1.f, dy = c.live ? later(c.dy, p.dy, t) : 0.f;
            const float* before = t > t0 ? history + (t - 1 - t0) * EACH * threads : start;
            float B[EACH], C[EACH], v[2 * EACH], gate = dy, dw = 0.f, dstep = 0.f, y = 0.f;
            if (p.z.data) {
              const float z = later(c.z, p.z, t);
              gate = dy * z * logistic(z);
            }
            c.row(B, c.B, p.B, t), c.row(C, c.C, p.C, t);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
              const float after = history[((t - t0) * EACH + n) * threads], dh = fmaf(gate, C[n], carry[n]);
              y = fmaf(after, C[n], y);
              v[n] = c.live ? dh * e * u : 0.f, v[EACH + n] = c.live ? gate * after : 0.f;
              dw = fmaf(dh, B[n], dw);
              carry[n] = dh * expf(e * c.A[n]);
              const float d = carry[n] * before[n * threads];
              dA[n] = fmaf(d, e, dA[n]), dstep = fmaf(d, c.A[n], dstep);
            }
            y = fmaf(c.D, u, group.sum(y)), dw = group.sum(dw), dstep = group.sum(dstep);
            const float du = fmaf(dw, e, gate * c.D), dd = fmaf(dw, u, dstep) * slope;
            dbias += dd, dD = fmaf(gate, u, dD);
            if (c.live && c.j == 0) {
              const int64_t o = (int64_t)(segment.x + t) * p.channels + c.channel;
              ((T*)p.du)[o] = from_float<T>(du), ((T*)p.ddelta)[o] = from_float<T>(dd);
              if (p.z.data) {
                const float z = later(c.z, p.z, t), sz = logistic(z);
                ((T*)p.dz)[(segment.x + t) * p.dz_token + c.channel] = from_float<T>(dy * y * sz * fmaf(z, 1.f - sz, 1.f));
                if (p.y) ((T*)p.y)[o] = from_float<T>(y * z * sz);
              }
            }
            int first = 0;
            halve<8>(v, 16, G <= 16, first), halve<4>(v, 8, G <= 8, first), halve<2>(v, 4, G <= 4, first);
            halve<1>(v, 2, G <= 2, first);
            if (G == 1) v[0] += __shfl_xor_sync(~0u, v[0], 1);
            const int kept = max(1, 16 * G / 32);
            float* sum = sums + (w * STEPS + t - t0) * columns;
#pragma unroll
            for (int n = 0; n < 16; n++)
              if (n < kept && (G > 1 || threadIdx.x % 2 == 0)) sum[(first + n) * G + c.j] = v[n];
          }
          __syncthreads();
          const int states = p.states;
          for (int n = threadIdx.x; n < (t1 - t0) * 2 * states; n += threads) {
            const int t = n / (2 * states), column = n % (2 * states);
            const int from = column < states ? column : EACH * G + column - states;
            float v = 0.f;
            for (int i = 0; i < warps; i++) v += sums[(i * STEPS + t) * columns + from];
            float* to = p.partial_BC + ((blockIdx.x * p.slots() + segment.x + t0 + t) * 2 * states + column);
            *to = pass ? *to + v : v;
          }
        }
      }
      if (p.dinitial) c.store(carry, p.dinitial, document_of(segment));
    }
    c.store(dA, p.partial_A, blockIdx.y);
    if (c.live && c.j == 0) {
      p.partial_D[(int64_t)blockIdx.y * p.channels + c.channel] = dD;
      p.partial_bias[(int64_t)blockIdx.y * p.channels + c.channel] = dbias;
    }
  }
}

// Second stage of every scan's backward: dB and dC over blocks of channels, dA, dD and dbias over items, in a fixed order.
template <class T>
__global__ void __launch_bounds__(256) reduce(const __grid_constant__ ScanParams p, int channel_blocks, int token_blocks) {
  wait_for_previous();
  const int N = p.states;
  if (blockIdx.x < token_blocks) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, slot = i / (2 * N), stride = p.slots() * 2 * N;
    if (slot >= p.slots()) return;
    const int column = i - slot * 2 * N;
    float v = 0.f;
    if (slot < p.schedule.row_ends[slot / p.row_length])
#pragma unroll 16
      for (int b = 0; b < channel_blocks; b++) v += __ldcs(p.partial_BC + b * stride + i);
    T* out = column < N ? (T*)p.dB + slot * p.dB_token + column : (T*)p.dC + slot * p.dC_token + column - N;
    *out = from_float<T>(v);
  } else {
    int64_t i = (int64_t)(blockIdx.x - token_blocks) * 256 + threadIdx.x;
    const int64_t num_A = (int64_t)p.channels * N;
    const int items = p.schedule.counts[0];
    const float* from = p.partial_A;
    float* to = p.dA;
    int64_t stride = num_A;
    if (i >= num_A) {
      i -= num_A, stride = p.channels, from = p.partial_D, to = p.dD;
      if (i >= p.channels) i -= p.channels, from = p.partial_bias, to = p.dbias;
      if (i >= p.channels || !to) return;
    }
    float v = 0.f;
#pragma unroll 8
    for (int k = 0; k < items; k++) v += from[k * stride + i];
    to[i] = v;
  }
}

int lanes(int states) {
  int G = 1;
  while (G * EACH < states) G *= 2;
  return G;
}
int threads_of(int G) { return G <= 8 ? 128 : 64; }

}  // namespace

int scan_block_channels(int states) {
  const int G = lanes(states);
  return max(MIN_CHANNELS, threads_of(G) / G);
}

void scan_forward(const ScanParams& p, cudaStream_t stream) {
  const int G = lanes(p.states), threads = threads_of(G), channels = threads / G;
  with_dtype(p.dtype, [&](auto t) {
    forward<decltype(t)><<<dim3((p.channels + channels - 1) / channels, p.schedule.max_items), threads, 0, stream>>>(p);
  });
}

void scan_backward(const ScanParams& p, cudaStream_t stream) {
  const int G = lanes(p.states), threads = threads_of(G), channels = scan_block_channels(p.states);
  const int bytes = 4 * ((CHUNK / STEPS + STEPS) * EACH * threads + threads / 32 * STEPS * 2 * EACH * G);
  const dim3 grid((p.channels + channels - 1) / channels, p.schedule.max_items);
  with_dtype(p.dtype, [&](auto t) {
    cudaFuncSetAttribute(backward<decltype(t)>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    backward<decltype(t)><<<grid, threads, bytes, stream>>>(p);
  });
  scan_reduce(p, grid.x, stream);
}

void scan_reduce(const ScanParams& p, int channel_blocks, cudaStream_t stream) {
  const int64_t token_blocks = (p.slots() * 2 * p.states + 255) / 256;
  const int64_t others = ((int64_t)p.channels * (p.states + 2) + 255) / 256;
  with_dtype(p.dtype, [&](auto t) {
    launch_behind(reduce<decltype(t)>, token_blocks + others, 256, 0, stream, p, channel_blocks, token_blocks);
  });
}

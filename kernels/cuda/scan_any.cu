// The selective scan for any activations and any number of states up to 256, in float32.
//
// Mapping: G lanes a channel, G the power of two with 8 G >= N; lane j holds states j, j + G, ...: at most 8 recurrences in
// registers, one item of the schedule a block, sequential over tokens in tiles of 8: a tile's inputs are loaded at once, rows of B
// and C by the warp into shared memory. The backward walks chunks of 64 tokens back: a replay from the saved state keeps every
// eighth state, a second one keeps 8 tokens' states, in shared memory. dB and dC are summed over a warp's channels by a transposing
// butterfly, over warps in shared memory, over the block's passes in its own partial.
// Bound: issue; about 7 instructions forward and 40 backward per token, channel and state.
// Bytes: as scan16's, with 4 N / 64 for saved states.
#include "element.cuh"

namespace {

constexpr int EACH = 8;    // states of a lane: stage() counts on it
constexpr int STEPS = 8;   // tokens whose states shared memory holds
constexpr int CHUNK = 64;  // tokens between saved states
constexpr int MIN_CHANNELS = 64;  // of a block of the backward, in as many passes as it takes: bounds the partials

struct Group {  // G lanes of one channel
  int G, log, j, warp_channels, block_channels;
  __device__ explicit Group(int states) {
    G = 1, log = 0;
    while (G * EACH < states) G *= 2, log++;
    j = threadIdx.x & (G - 1);
    warp_channels = 32 / G, block_channels = blockDim.x / G;
  }
  __device__ float sum(float v) const {
    for (int d = 1; d < G; d *= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
  }
};

constexpr int NUMBERS = 6;  // of a token and channel: step, u, gate (forward) or the gate's dy; slope, dz but for y, gate
enum class Pass { replay, forward, backward };
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float step_size(float x, bool softplus) { return softplus ? fmaxf(x, 0.f) + log1pf(ex2(-fabsf(x) * LOG2E)) : x; }
__device__ float logistic(float x) { return __fdividef(1.f, 1.f + ex2(-x * LOG2E)); }

// Floats of a warp's tile: rows of B and C, and its channels' numbers.
__host__ __device__ constexpr int tile_of(int G) { return STEPS * (2 * EACH * G + NUMBERS * 32 / G); }

// Channel-wise facts and the tensors of one segment, for one lane.
template <class T> struct Channel {
  const ScanParams& p;
  const T *u, *delta, *z, *dy, *B, *C;
  float A[EACH], bias, D;  // A times log2(e)
  int states, j, G, log, channels, channel;
  bool live;
  __device__ Channel(const ScanParams& p, const Group& group, int channel)
      : p(p), states(p.states), j(group.j), G(group.G), log(group.log), channels(group.warp_channels),
        channel(min(channel, p.channels - 1)), live(channel < p.channels) {
    for_states([&](int i, int n) { A[i] = LOG2E * p.A[(int64_t)this->channel * states + n]; }, A);
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
  // A tile for the warp, in shared memory. rows: B and C, [token][B, C][lane][state of the lane], zero for states that there are
  // not. own: numbers of a token and channel, [token][number][channel of the warp]; lane j makes those of tokens j, j + G, ...
  template <Pass PASS> __device__ void stage(float* rows, float* own, int t0, int count) const {
    const int shift = 3 + log, lane = threadIdx.x & 31;
    float us[STEPS], xs[STEPS], zs[STEPS], dys[STEPS];
#pragma unroll
    for (int r = 0; r < STEPS; r++) {
      const int t = r * G + j;
      us[r] = xs[r] = zs[r] = dys[r] = 0.f;
      if (t >= count) continue;
      us[r] = later(u, p.u, t0 + t), xs[r] = later(delta, p.delta, t0 + t);
      if (PASS != Pass::replay && p.z.data) zs[r] = later(z, p.z, t0 + t);
      if (PASS == Pass::backward && live) dys[r] = later(dy, p.dy, t0 + t);
    }
    __syncwarp();  // the last tile has been read
#pragma unroll 4
    for (int i = lane; i < count << (shift + 1); i += 32) {
      const int t = i >> (shift + 1), c = i >> shift & 1, n = (i & 7) * G + ((i >> 3) & (G - 1));
      if (c == 0 || PASS != Pass::replay) rows[i] = n < states ? later((c ? C : B) + n, c ? p.C : p.B, t0 + t) : 0.f;
    }
#pragma unroll
    for (int r = 0; r < STEPS; r++) {
      const int t = r * G + j;
      if (t >= count) continue;
      float* const to = own + t * NUMBERS * channels + (lane >> log);
      const float x = xs[r] + bias, z = zs[r], dy = dys[r], s = logistic(z);
      to[0] = step_size(x, p.softplus), to[channels] = us[r];
      if (PASS == Pass::forward) to[2 * channels] = p.z.data ? z * s : 1.f;
      if (PASS == Pass::backward) {
        to[2 * channels] = p.z.data ? dy * z * s : dy, to[3 * channels] = p.softplus ? logistic(x) : 1.f;
        to[4 * channels] = dy * s * fmaf(z, 1.f - s, 1.f), to[5 * channels] = z * s;
      }
    }
    __syncwarp();
  }
  __device__ void row(float (&v)[EACH], const float* rows, int t, int c) const {
    const float4* from = (const float4*)(rows + ((2 * t + c) * G + j) * EACH);
#pragma unroll
    for (int i = 0; i < EACH / 4; i++) {
      const float4 four = from[i];
      v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
  }
  __device__ float number(const float* own, int t, int which) const {
    return own[(t * NUMBERS + which) * channels + ((threadIdx.x & 31) >> log)];
  }
  __device__ void advance(float (&h)[EACH], const float* rows, const float* own, int t) const {
    const float e = number(own, t, 0), w = e * number(own, t, 1);
    float b[EACH];
    row(b, rows, t, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++) h[i] = fmaf(h[i], ex2(e * A[i]), w * b[i]);
  }
  __device__ int64_t saved(int document_start, int place) const { return document_start / CHUNK + place / CHUNK - 1; }
};

template <class T> __global__ void __launch_bounds__(128, 4) forward(const __grid_constant__ ScanParams p) {
  extern __shared__ float4 memory[];
  if (blockIdx.y >= p.schedule.counts[0]) return;
  const Group group(p.states);
  Channel<T> c(p, group, blockIdx.x * group.block_channels + threadIdx.x / group.G);
  float* const rows = (float*)memory + threadIdx.x / 32 * tile_of(group.G);
  float* const own = rows + STEPS * 2 * EACH * group.G;
  const int2 item = p.schedule.items[blockIdx.y];
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = p.schedule.segments[i];
    float h[EACH] = {};
    if (p.initial_state) c.load(h, p.initial_state, document_of(segment));
    c.enter(segment.x);
    for (int t0 = 0; t0 < segment.y - segment.x; t0 += STEPS) {
      const int count = min(STEPS, segment.y - segment.x - t0);
      if (p.saved && t0 % CHUNK == 0 && t0 > 0) c.store(h, (float*)p.saved, c.saved(segment.x, t0));
      c.template stage<Pass::forward>(rows, own, t0, count);
#pragma unroll 2
      for (int t = 0; t < count; t++) {
        c.advance(h, rows, own, t);
        float C[EACH], y = 0.f;
        c.row(C, rows, t, 1);
#pragma unroll
        for (int n = 0; n < EACH; n++) y = fmaf(h[n], C[n], y);
        y = fmaf(c.D, c.number(own, t, 1), group.sum(y)) * c.number(own, t, 2);
        if (c.live && c.j == 0) ((T*)p.y)[(int64_t)(segment.x + t0 + t) * p.channels + c.channel] = from_float<T>(y);
      }
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

template <class T> __global__ void __launch_bounds__(128, 3) backward(const __grid_constant__ ScanParams p) {
  extern __shared__ float4 memory[];
  if (blockIdx.y >= p.schedule.counts[0]) return;
  const Group group(p.states);
  const int G = group.G, threads = blockDim.x, columns = 2 * EACH * G, w = threadIdx.x >> 5, warps = threads / 32;
  float* const rows = (float*)memory + w * tile_of(G);
  float* const own = rows + STEPS * columns;
  float* const sums = (float*)memory + warps * tile_of(G);             // [warp][STEPS][columns]
  float* const starts = sums + warps * STEPS * columns + threadIdx.x;  // [CHUNK / STEPS][EACH][thread]
  float* const history = starts + CHUNK / STEPS * EACH * threads;      // [STEPS][EACH][thread]: states after a token
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
        const int end = min(length, c0 + CHUNK), last = c0 + (end - 1 - c0) / STEPS * STEPS;
        float h[EACH] = {};
        if (c0 > 0) c.load(h, (const float*)p.saved, c.saved(segment.x, c0));
        else if (p.initial_state) c.load(h, p.initial_state, document_of(segment));
        for (int t0 = c0; t0 <= last; t0 += STEPS) {
#pragma unroll
          for (int n = 0; n < EACH; n++) starts[((t0 - c0) / STEPS * EACH + n) * threads] = h[n];
          if (t0 == last) break;
          c.template stage<Pass::replay>(rows, own, t0, STEPS);
#pragma unroll 2
          for (int t = 0; t < STEPS; t++) c.advance(h, rows, own, t);
        }
        for (int t0 = last; t0 >= c0; t0 -= STEPS) {
          const float* start = starts + (t0 - c0) / STEPS * EACH * threads;
          const int count = min(end - t0, STEPS);
          c.template stage<Pass::backward>(rows, own, t0, count);
#pragma unroll
          for (int n = 0; n < EACH; n++) h[n] = start[n * threads];
#pragma unroll 2
          for (int t = 0; t < count; t++) {
            c.advance(h, rows, own, t);
#pragma unroll
            for (int n = 0; n < EACH; n++) history[(t * EACH + n) * threads] = h[n];
          }
          __syncthreads();  // the last sums have been read
#pragma unroll 1
          for (int t = count - 1; t >= 0; t--) {
            const float e = c.number(own, t, 0), u = c.number(own, t, 1), gate = c.number(own, t, 2);
            const float* before = t > 0 ? history + (t - 1) * EACH * threads : start;
            float B[EACH], C[EACH], v[2 * EACH], dw = 0.f, dstep = 0.f, y = 0.f;
            c.row(B, rows, t, 0), c.row(C, rows, t, 1);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
              const float after = history[(t * EACH + n) * threads], dh = fmaf(gate, C[n], carry[n]);
              y = fmaf(after, C[n], y);
              v[n] = c.live ? dh * e * u : 0.f, v[EACH + n] = gate * after;
              dw = fmaf(dh, B[n], dw);
              carry[n] = dh * ex2(e * c.A[n]);
              const float d = carry[n] * before[n * threads];
              dA[n] = fmaf(d, e, dA[n]), dstep = fmaf(d, c.A[n], dstep);
            }
            y = fmaf(c.D, u, group.sum(y)), dw = group.sum(dw), dstep = LN2 * group.sum(dstep);
            const float du = fmaf(dw, e, gate * c.D), dd = fmaf(dw, u, dstep) * c.number(own, t, 3);
            dbias += dd, dD = fmaf(gate, u, dD);
            if (c.live && c.j == 0) {
              const int64_t slot = segment.x + t0 + t, o = slot * p.channels + c.channel;
              ((T*)p.du)[o] = from_float<T>(du), ((T*)p.ddelta)[o] = from_float<T>(dd);
              if (p.z.data) {
                ((T*)p.dz)[slot * p.dz_token + c.channel] = from_float<T>(y * c.number(own, t, 4));
                if (p.y) ((T*)p.y)[o] = from_float<T>(y * c.number(own, t, 5));
              }
            }
            int first = 0;
            halve<8>(v, 16, G <= 16, first), halve<4>(v, 8, G <= 8, first), halve<2>(v, 4, G <= 4, first);
            halve<1>(v, 2, G <= 2, first);
            if (G == 1) v[0] += __shfl_xor_sync(~0u, v[0], 1);
            const int kept = max(1, 16 * G / 32);
            float* sum = sums + (w * STEPS + t) * columns;
#pragma unroll
            for (int n = 0; n < 16; n++)
              if (n < kept && (G > 1 || threadIdx.x % 2 == 0)) sum[(first + n) * G + c.j] = v[n];
          }
          __syncthreads();
          const int states = p.states;
          for (int n = threadIdx.x; n < count * 2 * states; n += threads) {
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
int tiles_of(int G) { return threads_of(G) / 32 * tile_of(G); }

}  // namespace

int scan_block_channels(int states) {
  const int G = lanes(states);
  return max(MIN_CHANNELS, threads_of(G) / G);
}

void scan_forward(const ScanParams& p, cudaStream_t stream) {
  const int G = lanes(p.states), threads = threads_of(G), channels = threads / G, bytes = 4 * tiles_of(G);
  with_dtype(p.dtype, [&](auto t) {
    forward<decltype(t)><<<dim3((p.channels + channels - 1) / channels, p.schedule.max_items), threads, bytes, stream>>>(p);
  });
}

void scan_backward(const ScanParams& p, cudaStream_t stream) {
  const int G = lanes(p.states), threads = threads_of(G), channels = scan_block_channels(p.states);
  const int bytes = 4 * (tiles_of(G) + ((CHUNK / STEPS + STEPS) * EACH + STEPS * 2 * EACH * G / 32) * threads);
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

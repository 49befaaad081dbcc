// The selective scan for any activations and any number of states up to 256, in float32; and the
// second stage of every scan's backward.
//
// Who holds what. G lanes a channel, G the power of two with 8 G >= N. Lane `member` of them holds
// states member, member + G, member + 2 G, ...: at most 8 recurrences in registers.
//
//   N = 16, G = 2                  lanes of a warp
//                    0      1      2      3      ...  30     31
//     channel        0      0      1      1      ...  15     15
//     states         0, 2,  1, 3,  0, 2,  1, 3,  ...
//                    ... 14 ... 15
//
//   blockIdx.x   block of channels        blockIdx.y   item of the schedule, walked in turn
//   token        0        8       16      tiles of 8 tokens: member j loads and prepares tokens
//                | tile   | tile   |      j, j + G, ... of its channel; the warp loads rows of B, C
//
// The backward walks chunks of 64 tokens back, and each twice: a replay from the saved state keeps
// every eighth state, a second one, tile by tile, keeps 8 tokens' states:
//
//   chunk        0      8      16     ...    56     64
//   replay       >>>>>>>|>>>>>>|>>>>>>  ...  |             starts[8]: states before each tile
//   tile by tile                             |>>>>>>|      history[8]: states after each token
//                                            |<<<<<<|      then back, the last tile first
//
// Shared memory, per warp: rows[token][B or C][lane][state of the lane] and numbers[token][Number]
// [channel of the warp]; backward also sums, starts and history, in [..][thread] order: no bank
// conflicts. dB and dC are summed over a warp's channels by a transposing butterfly, over warps in
// shared memory, over the block's passes in the block's own partial, then by `reduce` over blocks,
// in a fixed order: no atomics, the same bits every time.
//
// Bound: issue; about 7 instructions forward and 40 backward per token, channel and state.
// Bytes per token and channel: as scan16's, of a float 4, with 4 N / 64 for saved states.
#include "element.cuh"

namespace {

constexpr int EACH = 8;           // states of a lane: stage() counts on it
constexpr int STEPS = 8;          // tokens of a tile, whose states shared memory holds
constexpr int CHUNK = 64;         // tokens between saved states
constexpr int MIN_CHANNELS = 64;  // of a block of the backward, in as many passes as it takes:
                                  // bounds the partials

struct Group {  // the lanes of one channel
  int lanes;    // G
  int log;      // log2(G)
  int member;   // 0 to G - 1
  int warp_channels;
  int block_channels;
  __device__ explicit Group(int states) {
    lanes = 1;
    log = 0;
    while (lanes * EACH < states) {
      lanes *= 2;
      log++;
    }
    member = threadIdx.x & (lanes - 1);
    warp_channels = 32 / lanes;
    block_channels = blockDim.x / lanes;
  }
  __device__ float sum(float value) const {
    for (int distance = 1; distance < lanes; distance *= 2)
      value += __shfl_xor_sync(~0u, value, distance);
    return value;
  }
};

// What a tile knows of a token and channel.
enum Number : int {
  DT,     // the step size
  U,      // u
  GATE,   // forward: silu(z); backward: dy silu(z), g
  SLOPE,  // d dt / d delta
  DZ,     // dz but for the ungated y
  SILU,   // silu(z), backward
  NUMBERS
};
enum class Pass { replay, forward, backward };
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float step_size(float x, bool softplus) {
  return softplus ? fmaxf(x, 0.f) + log1pf(ex2(-fabsf(x) * LOG2E)) : x;
}
__device__ float logistic(float x) { return __fdividef(1.f, 1.f + ex2(-x * LOG2E)); }

// Floats of a warp's tile: rows of B and C, and its channels' numbers.
__host__ __device__ constexpr int tile_floats(int lanes) {
  return STEPS * (2 * EACH * lanes + NUMBERS * 32 / lanes);
}

// Channel-wise facts and the tensors of one segment, for one lane.
template <class T>
struct Channel {
  const ScanParams& params;
  const T *u, *delta, *z, *dy, *B, *C;  // of the segment's first token
  float A[EACH];                        // times log2(e)
  float bias;
  float D;
  int states;    // N
  int member;    // of the channel's lanes
  int lanes;     // G
  int log;       // log2(G)
  int channels;  // of the warp
  int channel;   // the lane's; the last one again where there is none
  bool live;     // whether there is one

  __device__ Channel(const ScanParams& params, const Group& group, int channel)
      : params(params),
        states(params.states),
        member(group.member),
        lanes(group.lanes),
        log(group.log),
        channels(group.warp_channels),
        channel(min(channel, params.channels - 1)),
        live(channel < params.channels) {
    for_states(
        [&](int i, int state) { A[i] = LOG2E * params.A[(int64_t)this->channel * states + state]; },
        A);
    bias = params.bias ? params.bias[this->channel] : 0.f;
    D = params.D ? params.D[this->channel] : 0.f;
  }

  // Calls body(i, state) for the lane's states; `otherwise` is zero where it has none.
  template <class Body>
  __device__ void for_states(Body body, float (&otherwise)[EACH]) const {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      otherwise[i] = 0.f;
      if (i * lanes + member < states) body(i, i * lanes + member);
    }
  }

  // A state of a (*, D, N) tensor.
  __device__ void load(float (&h)[EACH], const float* tensor, int64_t index) const {
    for_states(
        [&](int i, int state) {
          h[i] = tensor[(index * params.channels + channel) * states + state];
        },
        h);
  }
  __device__ void store(const float (&h)[EACH], float* tensor, int64_t index) const {
    if (!live) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (i * lanes + member < states)
        tensor[(index * params.channels + channel) * states + i * lanes + member] = h[i];
    }
  }

  // Turns to the segment that begins at a slot.
  __device__ void enter(int slot) {
    u = element_at<T>(params.u, slot, params.row_length, channel);
    delta = element_at<T>(params.delta, slot, params.row_length, channel);
    if (params.z.data) z = element_at<T>(params.z, slot, params.row_length, channel);
    if (params.dy.data) dy = element_at<T>(params.dy, slot, params.row_length, channel);
    B = element_at<T>(params.B, slot, params.row_length, 0);
    C = element_at<T>(params.C, slot, params.row_length, 0);
  }

  // A tile for the warp, in shared memory; see the head for the order. Rows are zero for states
  // that there are not. Member j makes the numbers of tokens j, j + G, ...
  template <Pass PASS>
  __device__ void stage(float* rows, float* numbers, int tile_start, int count) const {
    const int shift = 3 + log;
    const int lane = threadIdx.x & 31;
    float raw_u[STEPS], raw_delta[STEPS], raw_z[STEPS], raw_dy[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int token = step * lanes + member;
      raw_u[step] = raw_delta[step] = raw_z[step] = raw_dy[step] = 0.f;
      if (token >= count) continue;
      raw_u[step] = later(u, params.u, tile_start + token);
      raw_delta[step] = later(delta, params.delta, tile_start + token);
      if (PASS != Pass::replay && params.z.data)
        raw_z[step] = later(z, params.z, tile_start + token);
      if (PASS == Pass::backward && live) raw_dy[step] = later(dy, params.dy, tile_start + token);
    }
    __syncwarp();  // the last tile has been read
#pragma unroll 4
    for (int i = lane; i < count << (shift + 1); i += 32) {
      const int token = i >> (shift + 1);
      const int is_C = i >> shift & 1;
      const int state = (i & 7) * lanes + ((i >> 3) & (lanes - 1));
      if (is_C == 0 || PASS != Pass::replay) {
        rows[i] = state < states ? later((is_C ? C : B) + state, is_C ? params.C : params.B,
                                         tile_start + token)
                                 : 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int token = step * lanes + member;
      if (token >= count) continue;
      float* const to = numbers + token * NUMBERS * channels + (lane >> log);
      const float x = raw_delta[step] + bias;
      const float z = raw_z[step];
      const float dy = raw_dy[step];
      const float sigmoid = logistic(z);
      to[DT * channels] = step_size(x, params.softplus);
      to[U * channels] = raw_u[step];
      if (PASS == Pass::forward) to[GATE * channels] = params.z.data ? z * sigmoid : 1.f;
      if (PASS == Pass::backward) {
        to[GATE * channels] = params.z.data ? dy * z * sigmoid : dy;
        to[SLOPE * channels] = params.softplus ? logistic(x) : 1.f;
        to[DZ * channels] = dy * sigmoid * fmaf(z, 1.f - sigmoid, 1.f);
        to[SILU * channels] = z * sigmoid;
      }
    }
    __syncwarp();
  }

  // The lane's states of a token's row of B (0) or C (1).
  __device__ void row(float (&values)[EACH], const float* rows, int token, int is_C) const {
    const float4* from = (const float4*)(rows + ((2 * token + is_C) * lanes + member) * EACH);
#pragma unroll
    for (int i = 0; i < EACH / 4; i++) {
      const float4 four = from[i];
      values[4 * i] = four.x;
      values[4 * i + 1] = four.y;
      values[4 * i + 2] = four.z;
      values[4 * i + 3] = four.w;
    }
  }
  __device__ float number(const float* numbers, int token, Number which) const {
    return numbers[(token * NUMBERS + which) * channels + ((threadIdx.x & 31) >> log)];
  }

  // One token of the recurrence.
  __device__ void advance(float (&h)[EACH], const float* rows, const float* numbers,
                          int token) const {
    const float dt = number(numbers, token, DT);
    const float drive = dt * number(numbers, token, U);
    float B[EACH];
    row(B, rows, token, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      h[i] = fmaf(h[i], ex2(dt * A[i]), drive * B[i]);
  }

  // Where the state before a document's token lies, every CHUNK tokens but its start.
  __device__ int64_t saved(int document_start, int position) const {
    return document_start / CHUNK + position / CHUNK - 1;
  }
};

template <class T>
__global__ void __launch_bounds__(128, 4) forward(const __grid_constant__ ScanParams params) {
  extern __shared__ float4 memory[];
  if (blockIdx.y >= params.schedule.counts[0]) return;
  const Group group(params.states);
  Channel<T> channel(params, group, blockIdx.x * group.block_channels + threadIdx.x / group.lanes);
  float* const rows = (float*)memory + threadIdx.x / 32 * tile_floats(group.lanes);
  float* const numbers = rows + STEPS * 2 * EACH * group.lanes;
  const int2 item = params.schedule.items[blockIdx.y];
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = params.schedule.segments[i];
    float h[EACH] = {};
    if (params.initial_state) channel.load(h, params.initial_state, document_of(segment));
    channel.enter(segment.x);
    for (int tile_start = 0; tile_start < segment.y - segment.x; tile_start += STEPS) {
      const int count = min(STEPS, segment.y - segment.x - tile_start);
      if (params.saved && tile_start % CHUNK == 0 && tile_start > 0)
        channel.store(h, (float*)params.saved, channel.saved(segment.x, tile_start));
      channel.template stage<Pass::forward>(rows, numbers, tile_start, count);
#pragma unroll 2
      for (int token = 0; token < count; token++) {
        channel.advance(h, rows, numbers, token);
        float C[EACH];
        float y = 0.f;
        channel.row(C, rows, token, 1);
#pragma unroll
        for (int n = 0; n < EACH; n++)
          y = fmaf(h[n], C[n], y);
        y = fmaf(channel.D, channel.number(numbers, token, U), group.sum(y)) *
            channel.number(numbers, token, GATE);
        if (channel.live && channel.member == 0) {
          const int64_t slot = segment.x + tile_start + token;
          ((T*)params.y)[slot * params.channels + channel.channel] = from_float<T>(y);
        }
      }
    }
    if (params.final_state) channel.store(h, params.final_state, document_of(segment));
  }
}

// Sums 16 values over the lanes that hold the same states: each step halves the values a lane
// holds, and doubles the lanes they are summed over. A lane then holds values[0 ... kept - 1],
// numbers first ... of the 16.
template <int HALF>
__device__ void halve(float (&values)[16], int mask, bool active, int& first) {
  if (!active) return;
  const bool upper = threadIdx.x & mask;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float keep = upper ? values[HALF + i] : values[i];
    const float give = upper ? values[i] : values[HALF + i];
    values[i] = keep + __shfl_xor_sync(~0u, give, mask);
  }
  first += upper ? HALF : 0;
}

template <class T>
__global__ void __launch_bounds__(128, 3) backward(const __grid_constant__ ScanParams params) {
  extern __shared__ float4 memory[];
  if (blockIdx.y >= params.schedule.counts[0]) return;
  const Group group(params.states);
  const int lanes = group.lanes;
  const int threads = blockDim.x;
  const int columns = 2 * EACH * lanes;  // of a token: dB and dC, as rows has them
  const int warp = threadIdx.x >> 5;
  const int warps = threads / 32;
  float* const rows = (float*)memory + warp * tile_floats(lanes);
  float* const numbers = rows + STEPS * columns;
  // [warp][STEPS][columns]
  float* const sums = (float*)memory + warps * tile_floats(lanes);
  // [CHUNK / STEPS][EACH][thread]: states before each tile of a chunk
  float* const starts = sums + warps * STEPS * columns + threadIdx.x;
  // [STEPS][EACH][thread]: states after each token of a tile
  float* const history = starts + CHUNK / STEPS * EACH * threads;
  const int block_channels = max(MIN_CHANNELS, group.block_channels);
  const int2 item = params.schedule.items[blockIdx.y];
  for (int pass = 0; pass * group.block_channels < block_channels; pass++) {
    Channel<T> channel(
        params, group,
        blockIdx.x * block_channels + pass * group.block_channels + threadIdx.x / lanes);
    float dA[EACH] = {};
    float dD = 0.f;
    float dbias = 0.f;
    for (int i = item.y - 1; i >= item.x; i--) {
      const int4 segment = params.schedule.segments[i];
      const int length = segment.y - segment.x;
      float carry[EACH] = {};
      if (params.dfinal && channel.live) channel.load(carry, params.dfinal, document_of(segment));
      channel.enter(segment.x);
      for (int chunk_start = (length - 1) / CHUNK * CHUNK; chunk_start >= 0; chunk_start -= CHUNK) {
        const int end = min(length, chunk_start + CHUNK);
        const int last = chunk_start + (end - 1 - chunk_start) / STEPS * STEPS;

        // Replay: the states before each tile.
        float h[EACH] = {};
        if (chunk_start > 0)
          channel.load(h, (const float*)params.saved, channel.saved(segment.x, chunk_start));
        else if (params.initial_state)
          channel.load(h, params.initial_state, document_of(segment));
        for (int tile_start = chunk_start; tile_start <= last; tile_start += STEPS) {
#pragma unroll
          for (int n = 0; n < EACH; n++)
            starts[((tile_start - chunk_start) / STEPS * EACH + n) * threads] = h[n];
          if (tile_start == last) break;
          channel.template stage<Pass::replay>(rows, numbers, tile_start, STEPS);
#pragma unroll 2
          for (int token = 0; token < STEPS; token++)
            channel.advance(h, rows, numbers, token);
        }

        for (int tile_start = last; tile_start >= chunk_start; tile_start -= STEPS) {
          // Replay the tile: the states after each token.
          const float* start = starts + (tile_start - chunk_start) / STEPS * EACH * threads;
          const int count = min(end - tile_start, STEPS);
          channel.template stage<Pass::backward>(rows, numbers, tile_start, count);
#pragma unroll
          for (int n = 0; n < EACH; n++)
            h[n] = start[n * threads];
#pragma unroll 2
          for (int token = 0; token < count; token++) {
            channel.advance(h, rows, numbers, token);
#pragma unroll
            for (int n = 0; n < EACH; n++)
              history[(token * EACH + n) * threads] = h[n];
          }
          __syncthreads();  // the last sums have been read

          // Walk it back.
#pragma unroll 1
          for (int token = count - 1; token >= 0; token--) {
            const float dt = channel.number(numbers, token, DT);
            const float u = channel.number(numbers, token, U);
            const float gate = channel.number(numbers, token, GATE);
            const float* before = token > 0 ? history + (token - 1) * EACH * threads : start;
            float B[EACH], C[EACH];
            float terms[2 * EACH];  // of dB, then of dC
            float dw = 0.f;         // the gradient of dt u
            float ddt = 0.f;
            float y = 0.f;
            channel.row(B, rows, token, 0);
            channel.row(C, rows, token, 1);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
              const float after = history[(token * EACH + n) * threads];
              const float dh = fmaf(gate, C[n], carry[n]);
              y = fmaf(after, C[n], y);
              terms[n] = channel.live ? dh * dt * u : 0.f;
              terms[EACH + n] = gate * after;
              dw = fmaf(dh, B[n], dw);
              carry[n] = dh * ex2(dt * channel.A[n]);
              const float carry_h = carry[n] * before[n * threads];
              dA[n] = fmaf(carry_h, dt, dA[n]);
              ddt = fmaf(carry_h, channel.A[n], ddt);
            }
            y = fmaf(channel.D, u, group.sum(y));
            dw = group.sum(dw);
            ddt = LN2 * group.sum(ddt);
            const float du = fmaf(dw, dt, gate * channel.D);
            const float ddelta = fmaf(dw, u, ddt) * channel.number(numbers, token, SLOPE);
            dbias += ddelta;
            dD = fmaf(gate, u, dD);
            if (channel.live && channel.member == 0) {
              const int64_t slot = segment.x + tile_start + token;
              const int64_t output = slot * params.channels + channel.channel;
              ((T*)params.du)[output] = from_float<T>(du);
              ((T*)params.ddelta)[output] = from_float<T>(ddelta);
              if (params.z.data) {
                ((T*)params.dz)[slot * params.dz_token + channel.channel] =
                    from_float<T>(y * channel.number(numbers, token, DZ));
                if (params.y)
                  ((T*)params.y)[output] = from_float<T>(y * channel.number(numbers, token, SILU));
              }
            }

            // Sum dB and dC over the warp's channels.
            int first = 0;
            halve<8>(terms, 16, lanes <= 16, first);
            halve<4>(terms, 8, lanes <= 8, first);
            halve<2>(terms, 4, lanes <= 4, first);
            halve<1>(terms, 2, lanes <= 2, first);
            if (lanes == 1) terms[0] += __shfl_xor_sync(~0u, terms[0], 1);
            const int kept = max(1, 16 * lanes / 32);
            float* sum = sums + (warp * STEPS + token) * columns;
#pragma unroll
            for (int n = 0; n < 16; n++) {
              if (n < kept && (lanes > 1 || threadIdx.x % 2 == 0))
                sum[(first + n) * lanes + channel.member] = terms[n];
            }
          }
          __syncthreads();

          // Sum them over warps, and over passes.
          const int states = params.states;
          for (int n = threadIdx.x; n < count * 2 * states; n += threads) {
            const int token = n / (2 * states);
            const int column = n % (2 * states);
            const int from = column < states ? column : EACH * lanes + column - states;
            float total = 0.f;
            for (int i = 0; i < warps; i++)
              total += sums[(i * STEPS + token) * columns + from];
            const int64_t slot = blockIdx.x * params.slots() + segment.x + tile_start + token;
            float* to = params.partial_BC + (slot * 2 * states + column);
            *to = pass ? *to + total : total;
          }
        }
      }
      if (params.dinitial) channel.store(carry, params.dinitial, document_of(segment));
    }
    channel.store(dA, params.partial_A, blockIdx.y);
    if (channel.live && channel.member == 0) {
      params.partial_D[(int64_t)blockIdx.y * params.channels + channel.channel] = dD;
      params.partial_bias[(int64_t)blockIdx.y * params.channels + channel.channel] = dbias;
    }
  }
}

// Second stage of every scan's backward: dB and dC over blocks of channels, dA, dD and dbias over
// items, in a fixed order. One thread a sum; the first token_blocks blocks have those of dB and dC,
// a token's 2 N side by side.
// Bound: memory bandwidth. Bytes: partials read once, 8 N per token and block of channels.
template <class T>
__global__ void __launch_bounds__(256)
    reduce(const __grid_constant__ ScanParams params, int channel_blocks, int token_blocks) {
  wait_for_previous();
  const int N = params.states;
  if (blockIdx.x < token_blocks) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    const int64_t slot = i / (2 * N);
    const int64_t stride = params.slots() * 2 * N;
    if (slot >= params.slots()) return;
    const int column = i - slot * 2 * N;
    float sum = 0.f;
    if (slot < params.schedule.row_ends[slot / params.row_length]) {
#pragma unroll 16
      for (int block = 0; block < channel_blocks; block++)
        sum += __ldcs(params.partial_BC + block * stride + i);
    }
    T* out = column < N ? (T*)params.dB + slot * params.dB_token + column
                        : (T*)params.dC + slot * params.dC_token + column - N;
    *out = from_float<T>(sum);
  } else {
    int64_t i = (int64_t)(blockIdx.x - token_blocks) * 256 + threadIdx.x;
    const int64_t size_of_A = (int64_t)params.channels * N;
    const int items = params.schedule.counts[0];
    const float* from = params.partial_A;
    float* to = params.dA;
    int64_t stride = size_of_A;
    if (i >= size_of_A) {
      i -= size_of_A;
      stride = params.channels;
      from = params.partial_D;
      to = params.dD;
      if (i >= params.channels) {
        i -= params.channels;
        from = params.partial_bias;
        to = params.dbias;
      }
      if (i >= params.channels || !to) return;
    }
    float sum = 0.f;
#pragma unroll 8
    for (int item = 0; item < items; item++)
      sum += from[item * stride + i];
    to[i] = sum;
  }
}

int lanes_of(int states) {
  int lanes = 1;
  while (lanes * EACH < states)
    lanes *= 2;
  return lanes;
}
int threads_of(int lanes) { return lanes <= 8 ? 128 : 64; }
int tiles_floats(int lanes) { return threads_of(lanes) / 32 * tile_floats(lanes); }

}  // namespace

int scan_block_channels(int states) {
  const int lanes = lanes_of(states);
  return max(MIN_CHANNELS, threads_of(lanes) / lanes);
}

void scan_forward(const ScanParams& params, cudaStream_t stream) {
  const int lanes = lanes_of(params.states);
  const int threads = threads_of(lanes);
  const int channels = threads / lanes;
  const int bytes = 4 * tiles_floats(lanes);
  const dim3 grid((params.channels + channels - 1) / channels, params.schedule.max_items);
  with_dtype(params.dtype,
             [&](auto type) { forward<decltype(type)><<<grid, threads, bytes, stream>>>(params); });
}

void scan_backward(const ScanParams& params, cudaStream_t stream) {
  const int lanes = lanes_of(params.states);
  const int threads = threads_of(lanes);
  const int channels = scan_block_channels(params.states);
  const int states_floats = (CHUNK / STEPS + STEPS) * EACH;  // of a thread: starts, history
  const int sums_floats = STEPS * 2 * EACH * lanes / 32;
  const int bytes = 4 * (tiles_floats(lanes) + (states_floats + sums_floats) * threads);
  const dim3 grid((params.channels + channels - 1) / channels, params.schedule.max_items);
  with_dtype(params.dtype, [&](auto type) {
    const auto kernel = backward<decltype(type)>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, threads, bytes, stream>>>(params);
  });
  scan_reduce(params, grid.x, stream);
}

void scan_reduce(const ScanParams& params, int channel_blocks, cudaStream_t stream) {
  const int64_t token_blocks = (params.slots() * 2 * params.states + 255) / 256;
  const int64_t others = ((int64_t)params.channels * (params.states + 2) + 255) / 256;
  with_dtype(params.dtype, [&](auto type) {
    launch_behind(reduce<decltype(type)>, token_blocks + others, 256, 0, stream, params,
                  channel_blocks, token_blocks);
  });
}

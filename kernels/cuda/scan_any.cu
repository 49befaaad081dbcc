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
//   blockIdx.x   (item, block of channels), the blocks of an item side by side
//   token        0        8       16      tiles of 8 tokens: member j loads and prepares tokens
//                | tile   | tile   |      j, j + G, ... of its channel; the warp loads rows of B, C
//
// The segments of a document that is longer than one are walked at once, from the states that
// `piece` and `combine` find first, as scan16_cut.cu draws it; in every batch, so that a document's
// bits are the same in all.
//
// The backward walks chunks of 64 tokens back, and each twice: a replay from the saved state keeps
// every eighth state, a second one, tile by tile, keeps 8 tokens' states in registers:
//
//   chunk        0      8      16     ...    56     64
//   replay       >>>>>>>|>>>>>>|>>>>>>  ...  |             starts[8]: states before each tile
//   tile by tile                             |>>>>>>|      history[8]: states after each token
//                                            |<<<<<<|      then back, the last tile first
//
// A tile's tokens past the end of its segment have zeros for all numbers, and change nothing: so
// loops over a tile are unrolled, and its tokens overlap.
//
// Shared memory, per warp: rows[token][B or C][lane][state of the lane] and numbers[token][Number]
// [channel of the warp]; backward also sums, and starts in [..][thread] order: no bank conflicts.
// dB and dC are summed over a warp's channels by a transposing butterfly, over warps in shared
// memory, over the block's passes in the block's own partial, then by `reduce` over blocks, in a
// fixed order: no atomics, the same bits every time.
//
// Bound: issue, of which 0.65 forward and 0.59 backward are used (one H200, ncu); about 54
// instructions backward per token, channel and state, a third of them the two replays.
// Bytes per token and channel: as scan16's, of a float 4, with 4 N / 64 for saved states.
#include <cfloat>
#include "element.cuh"

namespace {

constexpr int EACH = 8;   // states of a lane: stage() counts on it
constexpr int STEPS = 8;  // tokens of a tile, whose states shared memory holds
constexpr int CHUNK = SAVE_EVERY_FLOAT;
constexpr int MIN_CHANNELS = 64;  // of a block of the backward, in as many passes as it takes:
                                  // bounds the partials

// The lanes of one channel. LANES: their number where it is known when this is compiled, as for the
// usual 16 states; 0: from the number of states.
template <int LANES>
struct Group {
  int lanes;   // G
  int log;     // log2(G)
  int member;  // 0 to G - 1
  int warp_channels;
  int block_channels;
  __device__ explicit Group(int states) {
    lanes = 1;
    log = 0;
    while (LANES ? lanes < LANES : lanes * EACH < states) {
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
// What a walk needs of a tile: a replay u and B, a walk back from the end dy and C, the others all.
enum class Pass { replay, back, forward, backward };
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The softplus and its derivative. With e = exp(-|x|) the one is max(x, 0) + log1p(e), and
// log1p(e) / e a polynomial with relative error 3e-8; the other 1 / (1 + e), times e if x < 0.
__device__ float softplus(float x, float& slope) {
  const float e = ex2(-fabsf(x) * LOG2E);
  const float logistic = __fdividef(1.f, 1.f + e);
  slope = x < 0.f ? e * logistic : logistic;
  float series = fmaf(0.00523269083f, e, -0.0295052286f);
  series = fmaf(series, e, 0.0782259479f);
  series = fmaf(series, e, -0.136632457f);
  series = fmaf(series, e, 0.191060081f);
  series = fmaf(series, e, -0.24842982f);
  series = fmaf(series, e, 0.333190978f);
  series = fmaf(series, e, -0.499994934f);
  series = fmaf(series, e, 0.99999994f);
  return fmaf(e, series, fmaxf(x, 0.f));
}
__device__ float logistic(float x) { return __fdividef(1.f, 1.f + ex2(-x * LOG2E)); }

// Floats of a warp's tile: rows of B and C, and its channels' numbers.
__host__ __device__ constexpr int tile_floats(int lanes) {
  return STEPS * (2 * EACH * lanes + NUMBERS * 32 / lanes);
}

// Channel-wise facts and the tensors of one segment, for one lane.
template <class T, int LANES>
struct Channel {
  // Tokens of a tile that a lane prepares, at most.
  static constexpr int OWN = LANES ? STEPS / LANES : STEPS;

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

  __device__ Channel(const ScanParams& params, const Group<LANES>& group, int channel)
      : params(params),
        states(params.states),
        member(group.member),
        lanes(group.lanes),
        log(group.log),
        channels(group.warp_channels),
        channel(min(channel, params.channels - 1)),
        live(channel < params.channels) {
    for_states(
        [&](int i, int state) {
          const float rate = LOG2E * params.A[(int64_t)this->channel * states + state];
          // Minus infinity times the dt of 0 past a segment's end would be no number.
          A[i] = rate < -FLT_MAX ? -FLT_MAX : rate;
        },
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
  __device__ void load_or_zero(float (&h)[EACH], const float* tensor, int64_t index) const {
    if (tensor) return load(h, tensor, index);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      h[i] = 0.f;
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
  // that there are not, all numbers and rows for tokens from `count` on. Member j makes the numbers
  // of tokens j, j + G, ...
  // Past the ends the last token and state are read again: without a branch all loads are under way
  // together.
  template <Pass PASS>
  __device__ void stage(float* rows, float* numbers, int tile_start, int count) const {
    constexpr bool NEEDS_U = PASS != Pass::back;
    constexpr bool NEEDS_Z = PASS != Pass::replay;
    constexpr bool NEEDS_DY = PASS == Pass::back || PASS == Pass::backward;
    constexpr bool NEEDS_B = PASS != Pass::back;
    constexpr bool NEEDS_C = PASS != Pass::replay;
    constexpr int AT_ONCE = 4 * (LANES ? LANES : 1);  // numbers of rows, of a lane
    const bool gated = NEEDS_Z && params.z.data;
    const int lane = threadIdx.x & 31;
    T raw_u[OWN], raw_delta[OWN], raw_z[OWN] = {}, raw_dy[OWN];
#pragma unroll
    for (int step = 0; step < OWN; step++) {
      const int token = tile_start + min(step * lanes + member, count - 1);
      raw_delta[step] = later(delta, params.delta, token);
      if (NEEDS_U) raw_u[step] = later(u, params.u, token);
      if (NEEDS_DY) raw_dy[step] = later(dy, params.dy, token);
    }
    if (gated) {
#pragma unroll
      for (int step = 0; step < OWN; step++)
        raw_z[step] = later(z, params.z, tile_start + min(step * lanes + member, count - 1));
    }
    __syncwarp();  // the last tile has been read
#pragma unroll 1
    for (int first = 0; first < 4 * lanes; first += AT_ONCE) {
      T raw[AT_ONCE];
      bool inside[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const int i = 32 * (first + n) + lane;
        const int token = i >> (4 + log);
        const bool is_C = !NEEDS_B || (NEEDS_C && (i >> (3 + log) & 1));
        const int state = (i & 7) * lanes + ((i >> 3) & (lanes - 1));
        inside[n] = token < count && state < states;
        raw[n] = later((is_C ? C : B) + min(state, states - 1), is_C ? params.C : params.B,
                       tile_start + min(token, count - 1));
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++)
        rows[32 * (first + n) + lane] = inside[n] ? to_float(raw[n]) : 0.f;
    }
#pragma unroll
    for (int step = 0; step < OWN; step++) {
      const int token = step * lanes + member;
      if (token >= STEPS) continue;
      const bool inside = token < count;
      float* const to = numbers + token * NUMBERS * channels + (lane >> log);
      const float x = to_float(raw_delta[step]) + bias;
      const float z = to_float(raw_z[step]);
      const float sigmoid = logistic(z);
      const float silu = gated ? z * sigmoid : 1.f;
      float slope;
      const float dt = softplus(x, slope);
      to[DT * channels] = inside ? (params.softplus ? dt : x) : 0.f;
      if (NEEDS_U) to[U * channels] = inside ? to_float(raw_u[step]) : 0.f;
      if (PASS == Pass::forward) to[GATE * channels] = silu;
      if (NEEDS_DY) {
        const float dy = inside && live ? to_float(raw_dy[step]) : 0.f;
        to[GATE * channels] = dy * silu;
        to[DZ * channels] = dy * sigmoid * fmaf(z, 1.f - sigmoid, 1.f);
      }
      if (PASS == Pass::backward) {
        to[SLOPE * channels] = params.softplus ? slope : 1.f;
        to[SILU * channels] = silu;
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
  __device__ void advance(float (&after)[EACH], const float (&before)[EACH], const float* rows,
                          const float* numbers, int token) const {
    const float dt = number(numbers, token, DT);
    const float drive = dt * number(numbers, token, U);
    float B[EACH];
    row(B, rows, token, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      after[i] = fmaf(before[i], ex2(dt * A[i]), drive * B[i]);
  }

  // One token of the gradient's walk back, without gradients of inputs.
  __device__ void retreat(float (&carry)[EACH], const float* rows, const float* numbers,
                          int token) const {
    const float dt = number(numbers, token, DT);
    const float gate = number(numbers, token, GATE);
    float C[EACH];
    row(C, rows, token, 1);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      carry[i] = fmaf(gate, C[i], carry[i]) * ex2(dt * A[i]);
  }

  // Where the state before a document's token lies, every CHUNK tokens but its start.
  __device__ int64_t saved(int document_start, int position) const {
    return document_start / CHUNK + position / CHUNK - 1;
  }
};

// A block's item of the schedule, and its block of channels, of so many channels.
struct Place {
  int number;         // of the item
  int channel_block;  // of the grid's
  __device__ Place(const ScanParams& params, int block_channels) {
    const int blocks = (params.channels + block_channels - 1) / block_channels;
    number = blockIdx.x / blocks;
    channel_block = blockIdx.x - number * blocks;
  }
};

template <class T, int LANES>
__global__ void __launch_bounds__(128, 5) forward(const __grid_constant__ ScanParams params) {
  extern __shared__ float4 memory[];
  const Group<LANES> group(params.states);
  const Place place(params, group.block_channels);
  if (place.number >= params.schedule.counts[0]) return;
  Channel<T, LANES> channel(params, group,
                            place.channel_block * group.block_channels + threadIdx.x / group.lanes);
  float* const rows = (float*)memory + threadIdx.x / 32 * tile_floats(group.lanes);
  float* const numbers = rows + STEPS * 2 * EACH * group.lanes;
  const int2 item = params.schedule.items[place.number];
  float h[EACH] = {};
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = params.schedule.segments[i];
    const int document = document_of(segment);
    const int before = segment.x - params.starts[document];  // tokens of the document
    if (segment.w >= 0) {
      channel.load(h, params.cut_states, segment.w);
    } else if (before > 0) {
      // The segment before ended with it.
    } else {
      channel.load_or_zero(h, params.initial_state, document);
    }
    channel.enter(segment.x);
    for (int tile_start = 0; tile_start < segment.y - segment.x; tile_start += STEPS) {
      const int count = min(STEPS, segment.y - segment.x - tile_start);
      const int position = before + tile_start;
      if (params.saved && position % CHUNK == 0 && position > 0)
        channel.store(h, (float*)params.saved, channel.saved(segment.x - before, position));
      channel.template stage<Pass::forward>(rows, numbers, tile_start, count);
#pragma unroll
      for (int token = 0; token < STEPS; token++) {
        channel.advance(h, h, rows, numbers, token);
        float C[EACH];
        float y = 0.f;
        channel.row(C, rows, token, 1);
#pragma unroll
        for (int n = 0; n < EACH; n++)
          y = fmaf(h[n], C[n], y);
        y = fmaf(channel.D, channel.number(numbers, token, U), group.sum(y)) *
            channel.number(numbers, token, GATE);
        if (token < count && channel.live && channel.member == 0) {
          const int64_t slot = segment.x + tile_start + token;
          ((T*)params.y)[slot * params.channels + channel.channel] = from_float<T>(y);
        }
      }
    }
    if (params.final_state && segment.y == params.ends[document])
      channel.store(h, params.final_state, document);
  }
}

// The state that each segment of a cut document but the last ends with when it starts from zero,
// and its sum of dt; REVERSE: the gradient that each but the first passes to the one before it.
template <class T, int LANES, bool REVERSE>
__global__ void __launch_bounds__(128, 5) piece(const __grid_constant__ ScanParams params) {
  extern __shared__ float4 memory[];
  const Group<LANES> group(params.states);
  const Place place(params, group.block_channels);
  if (place.number >= params.schedule.counts[2]) return;
  const int4 segment = params.schedule.segments[params.schedule.cut_segments[place.number]];
  const int document = document_of(segment);
  if (REVERSE ? segment.x == params.starts[document] : segment.y == params.ends[document]) return;
  Channel<T, LANES> channel(params, group,
                            place.channel_block * group.block_channels + threadIdx.x / group.lanes);
  float* const rows = (float*)memory + threadIdx.x / 32 * tile_floats(group.lanes);
  float* const numbers = rows + STEPS * 2 * EACH * group.lanes;
  channel.enter(segment.x);
  const int tiles = (segment.y - segment.x + STEPS - 1) / STEPS;
  float h[EACH] = {};
  float sum = 0.f;
  for (int tile = 0; tile < tiles; tile++) {
    const int tile_start = (REVERSE ? tiles - 1 - tile : tile) * STEPS;
    const int count = min(STEPS, segment.y - segment.x - tile_start);
    channel.template stage<REVERSE ? Pass::back : Pass::replay>(rows, numbers, tile_start, count);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int token = REVERSE ? STEPS - 1 - step : step;
      sum += channel.number(numbers, token, DT);
      if (REVERSE)
        channel.retreat(h, rows, numbers, token);
      else
        channel.advance(h, h, rows, numbers, token);
    }
  }
  channel.store(h, params.cut_states, segment.w);
  if (channel.live && channel.member == 0)
    params.cut_sums[(int64_t)segment.w * params.channels + channel.channel] = sum;
}

constexpr int AHEAD = 8;  // segments whose end states are loaded together

// Replaces ends from zero by starts, segment after segment of a document; a thread a state. The
// grid: (document, block of channels and states).
template <bool REVERSE>
__global__ void __launch_bounds__(128) combine(const __grid_constant__ ScanParams params) {
  const int size = params.channels * params.states;
  const int blocks = (size + 127) / 128;
  const int number = blockIdx.x / blocks;
  const int i = (blockIdx.x - number * blocks) * 128 + threadIdx.x;
  if (number >= params.schedule.counts[3] || i >= size) return;
  const int4 pieces = params.schedule.cut_documents[number];
  const float* first = REVERSE ? params.dfinal : params.initial_state;
  const float A = LOG2E * params.A[i];
  float h = first ? first[(int64_t)pieces.z * size + i] : 0.f;
  for (int base = 0; base < pieces.y; base += AHEAD) {
    float end[AHEAD], sum[AHEAD];
    auto place = [&](int n) { return (int64_t)pieces.x + (REVERSE ? pieces.y - 1 - n : n); };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      if (base + n + 1 < pieces.y) {  // the last has no end state
        end[n] = params.cut_states[place(base + n) * size + i];
        sum[n] = params.cut_sums[place(base + n) * params.channels + i / params.states];
      }
    }
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      if (base + n < pieces.y) {
        params.cut_states[place(base + n) * size + i] = h;
        h = fmaf(h, ex2(sum[n] * A), end[n]);
      }
    }
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

template <class T, int LANES>
__global__ void __launch_bounds__(128, 3) backward(const __grid_constant__ ScanParams params) {
  extern __shared__ float4 memory[];
  const Group<LANES> group(params.states);
  const int block_channels = max(MIN_CHANNELS, group.block_channels);
  const Place place(params, block_channels);
  if (place.number >= params.schedule.counts[0]) return;
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
  const int2 item = params.schedule.items[place.number];
  for (int pass = 0; pass * group.block_channels < block_channels; pass++) {
    Channel<T, LANES> channel(
        params, group,
        place.channel_block * block_channels + pass * group.block_channels + threadIdx.x / lanes);
    float dA[EACH] = {};
    float dD = 0.f;
    float dbias = 0.f;
    float carry[EACH] = {};
    for (int i = item.y - 1; i >= item.x; i--) {
      const int4 segment = params.schedule.segments[i];
      const int document = document_of(segment);
      const int before = segment.x - params.starts[document];  // tokens of the document
      const int length = segment.y - segment.x;
      if (segment.w >= 0) {
        channel.load(carry, params.cut_states, segment.w);
      } else if (segment.y < params.ends[document]) {
        // The segment behind passed it on.
      } else {
        channel.load_or_zero(carry, params.dfinal, document);
      }
      channel.enter(segment.x);
      for (int chunk_start = (length - 1) / CHUNK * CHUNK; chunk_start >= 0; chunk_start -= CHUNK) {
        const int end = min(length, chunk_start + CHUNK);
        const int last = chunk_start + (end - 1 - chunk_start) / STEPS * STEPS;
        const int position = before + chunk_start;

        // Replay: the states before each tile.
        float h[EACH];
        if (position > 0)
          channel.load(h, (const float*)params.saved, channel.saved(segment.x - before, position));
        else
          channel.load_or_zero(h, params.initial_state, document);
        for (int tile_start = chunk_start; tile_start <= last; tile_start += STEPS) {
#pragma unroll
          for (int n = 0; n < EACH; n++)
            starts[((tile_start - chunk_start) / STEPS * EACH + n) * threads] = h[n];
          if (tile_start == last) break;
          channel.template stage<Pass::replay>(rows, numbers, tile_start, STEPS);
#pragma unroll
          for (int token = 0; token < STEPS; token++)
            channel.advance(h, h, rows, numbers, token);
        }

        for (int tile_start = last; tile_start >= chunk_start; tile_start -= STEPS) {
          // Replay the tile: the states before its first token, and after each.
          const int count = min(end - tile_start, STEPS);
          channel.template stage<Pass::backward>(rows, numbers, tile_start, count);
          float history[STEPS + 1][EACH];
#pragma unroll
          for (int n = 0; n < EACH; n++)
            history[0][n] = starts[((tile_start - chunk_start) / STEPS * EACH + n) * threads];
#pragma unroll
          for (int token = 0; token < STEPS; token++)
            channel.advance(history[token + 1], history[token], rows, numbers, token);
          __syncthreads();  // the last sums have been read

          // Walk it back.
#pragma unroll
          for (int token = STEPS - 1; token >= 0; token--) {
            const float dt = channel.number(numbers, token, DT);
            const float u = channel.number(numbers, token, U);
            const float gate = channel.number(numbers, token, GATE);
            const float drive = channel.live ? dt * u : 0.f;
            float B[EACH], C[EACH];
            float terms[2 * EACH];  // of dB, then of dC
            float dw = 0.f;         // the gradient of dt u
            float ddt = 0.f;
            float y = 0.f;
            channel.row(B, rows, token, 0);
            channel.row(C, rows, token, 1);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
              const float after = history[token + 1][n];
              const float dh = fmaf(gate, C[n], carry[n]);
              y = fmaf(after, C[n], y);
              terms[n] = dh * drive;
              terms[EACH + n] = gate * after;
              dw = fmaf(dh, B[n], dw);
              carry[n] = dh * ex2(dt * channel.A[n]);
              const float carry_h = carry[n] * history[token][n];
              dA[n] = fmaf(carry_h, dt, dA[n]);
              ddt = fmaf(carry_h, channel.A[n], ddt);
            }
            y = fmaf(channel.D, u, group.sum(y));
            dw = group.sum(dw);
            ddt = LN2 * group.sum(ddt);
            const float du = fmaf(dw, dt, gate * channel.D);
            const float ddelta = fmaf(dw, u, ddt) * channel.number(numbers, token, SLOPE);
            dbias += token < count ? ddelta : 0.f;
            dD = fmaf(gate, u, dD);
            if (token < count && channel.live && channel.member == 0) {
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
          for (int n = threadIdx.x; n < count * columns; n += threads) {
            const int token = n >> (4 + group.log);
            const int from = n & (columns - 1);
            const int is_C = from >> (3 + group.log);
            const int state = from & (columns / 2 - 1);
            if (state >= states) continue;
            float total = 0.f;
            for (int i = 0; i < warps; i++)
              total += sums[(i * STEPS + token) * columns + from];
            const int64_t slot =
                place.channel_block * params.slots() + segment.x + tile_start + token;
            float* to = params.partial_BC + ((2 * slot + is_C) * states + state);
            *to = pass ? *to + total : total;
          }
        }
      }
      if (params.dinitial && before == 0) channel.store(carry, params.dinitial, document);
    }
    channel.store(dA, params.partial_A, place.number);
    if (channel.live && channel.member == 0) {
      const int64_t index = (int64_t)place.number * params.channels + channel.channel;
      params.partial_D[index] = dD;
      params.partial_bias[index] = dbias;
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
int ceil_div(int numerator, int denominator) { return (numerator + denominator - 1) / denominator; }

// Calls body(a value of the element type, the lanes of a channel as a type if they are the usual
// ones).
template <int LANES>
struct Lanes {
  static constexpr int value = LANES;
};
template <class Body>
void with_types(const ScanParams& params, Body body) {
  with_dtype(params.dtype, [&](auto type) {
    if (lanes_of(params.states) == 2)
      body(type, Lanes<2>());
    else
      body(type, Lanes<0>());
  });
}

// What the segments of long documents start from, or, in reverse, pass to those before them.
template <bool REVERSE>
void start_states(const ScanParams& params, cudaStream_t stream) {
  if (!params.schedule.max_cut_segments) return;
  const int lanes = lanes_of(params.states);
  const int threads = threads_of(lanes);
  const int blocks = ceil_div(params.channels, threads / lanes);
  with_types(params, [&](auto type, auto usual) {
    piece<decltype(type), decltype(usual)::value, REVERSE>
        <<<params.schedule.max_cut_segments * blocks, threads, 4 * tiles_floats(lanes), stream>>>(
            params);
  });
  const int state_blocks = ceil_div(params.channels * params.states, 128);
  combine<REVERSE><<<params.schedule.max_cut_documents * state_blocks, 128, 0, stream>>>(params);
}

}  // namespace

int scan_block_channels(int states) {
  const int lanes = lanes_of(states);
  return max(MIN_CHANNELS, threads_of(lanes) / lanes);
}

void scan_forward(const ScanParams& params, cudaStream_t stream) {
  start_states<false>(params, stream);
  const int lanes = lanes_of(params.states);
  const int threads = threads_of(lanes);
  const int blocks = ceil_div(params.channels, threads / lanes);
  with_types(params, [&](auto type, auto usual) {
    forward<decltype(type), decltype(usual)::value>
        <<<params.schedule.max_items * blocks, threads, 4 * tiles_floats(lanes), stream>>>(params);
  });
}

void scan_backward(const ScanParams& params, cudaStream_t stream) {
  start_states<true>(params, stream);
  const int lanes = lanes_of(params.states);
  const int threads = threads_of(lanes);
  const int blocks = ceil_div(params.channels, scan_block_channels(params.states));
  const int states_floats = CHUNK / STEPS * EACH;  // of a thread
  const int sums_floats = STEPS * 2 * EACH * lanes / 32;
  const int bytes = 4 * (tiles_floats(lanes) + (states_floats + sums_floats) * threads);
  with_types(params, [&](auto type, auto usual) {
    const auto kernel = backward<decltype(type), decltype(usual)::value>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<params.schedule.max_items * blocks, threads, bytes, stream>>>(params);
  });
  scan_reduce(params, blocks, stream);
}

void scan_reduce(const ScanParams& params, int channel_blocks, cudaStream_t stream) {
  const int64_t token_blocks = (params.slots() * 2 * params.states + 255) / 256;
  const int64_t others = ((int64_t)params.channels * (params.states + 2) + 255) / 256;
  with_dtype(params.dtype, [&](auto type) {
    launch_behind(reduce<decltype(type)>, token_blocks + others, 256, 0, stream, params,
                  channel_blocks, token_blocks);
  });
}

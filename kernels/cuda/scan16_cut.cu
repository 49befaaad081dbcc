// Start states of the segments of long documents (bfloat16, 16 states); the mirror image gives the
// gradients that the segments end with.
//
// Few or long documents leave the chip empty, so the schedule cuts them. A segment's end is
//   h_end = exp(A sum of dt) h_start + (its end when it starts from zero),
// which is known before the segment's start is:
//
//   document     | segment 0 | segment 1 | segment 2 |       one work item each
//   piece          from zero   from zero   (not needed)      blockIdx.y = cut segment, as the
//                      |           |                         forward: a warp = 16 channels
//   combine      h0 ---+--> h1 ----+--> h2                   a thread = 4 states of a channel,
//                                                            in turn; blockIdx.y = cut document
//   forward      starts from h0, h1, h2 at once              scan16_forward.cu
//
// The backward runs from the last segment to the first, with dy silu(z) in place of dt u, C in
// place of B, and no work for segment 0.
//
// Shared memory, per warp: as the forward's; no C, no constants.
// Bound: as the forward's, without output; runs only over cut segments.
// Bytes per token and channel: 4 read (backward 6); states of segments twice.
// Registers: at most 80 in `piece`, for six blocks on a multiprocessor; 116 in `combine`.
#include "scan16.cuh"

namespace {

constexpr int PITCH = 12;  // of a token's dt: no bank conflicts, written or read

struct Inputs {  // of a tile, staged by each lane for itself: pairs of channels by half of the tile
  uint32_t driving[2][32];  // u, or dy
  uint32_t delta[2][32];
  uint32_t z[2][32];
};

struct Shared {  // of a warp; two buffers
  float2 dt[TILE * PITCH];
  Inputs inputs[2];
  uint32_t rows[2][2][32];  // of B, or C: pairs of states by octet
};

// The state that each segment but the last ends with when it starts from zero, and its sum of dt.
template <bool REVERSE, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, 6) piece(const __grid_constant__ ScanParams params) {
  __shared__ Shared all_shared[WARPS];
  let_next_start();
  if (blockIdx.y >= params.schedule.counts[2]) return;
  const int4 segment = params.schedule.segments[params.schedule.cut_segments[blockIdx.y]];
  const int document = document_of(segment);
  const int length = segment.y - segment.x;
  if (REVERSE ? segment.x == params.starts[document] : segment.y == params.ends[document]) return;
  const Lane mine(params.channels);
  const int lane = mine.lane;
  const int member = mine.member;
  Shared& shared = all_shared[threadIdx.x >> 5];
  float A[2][4], h[2][4];
  float sum[2] = {};  // of the lane's tokens' dt
  load_decay(A, params, mine);
  set_zero(h);
  const float2 bias = load_pair(params.bias, mine);
  const View& driving_view = REVERSE ? params.dy : params.u;
  const View& row_view = REVERSE ? params.C : params.B;
  const char* driving = slot_address(driving_view, segment.x, params.row_length, mine.loaded);
  const char* delta = slot_address(params.delta, segment.x, params.row_length, mine.loaded);
  const char* z =
      REVERSE && GATE ? slot_address(params.z, segment.x, params.row_length, mine.loaded) : nullptr;
  const char* row = slot_address(row_view, segment.x, params.row_length, 2 * member);

  // Copies a tile ahead. Past the end the segment's last token is read again, and masked when it is
  // used.
  auto stage = [&](int tile_start, int buffer) {
    Inputs& inputs = shared.inputs[buffer];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = min(tile_start + member + 4 * half, length - 1);
      copy4(&inputs.driving[half][lane], token_address(driving, driving_view, token));
      copy4(&inputs.delta[half][lane], token_address(delta, params.delta, token));
      if (REVERSE && GATE) copy4(&inputs.z[half][lane], token_address(z, params.z, token));
    }
    const int token = min(tile_start + mine.column_token, length - 1);
    const char* row_t = token_address(row, row_view, token);
    copy4(&shared.rows[buffer][0][lane], row_t);
    copy4(&shared.rows[buffer][1][lane], row_t + 16);
    copies_issued();
  };

  const int tiles = (length + TILE - 1) / TILE;
  stage(REVERSE ? (tiles - 1) * TILE : 0, 0);
  for (int tile = 0, buffer = 0; tile < tiles; tile++, buffer ^= 1) {
    const int tile_start = (REVERSE ? tiles - 1 - tile : tile) * TILE;
    const Inputs& inputs = shared.inputs[buffer];

    // Each lane prepares its two tokens of its two channels.
    copies_arrived();
    uint32_t drive[2][2], row_t[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool inside = tile_start + member + 4 * half < length;
      float dt[2];
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        float unused;
        const float raw = element(inputs.delta[half][lane], odd) + (odd ? bias.y : bias.x);
        const float driving_t = element(inputs.driving[half][lane], odd);
        dt[odd] = SOFTPLUS ? softplus(raw, unused) : raw;
        dt[odd] = inside ? dt[odd] : 0.f;
        sum[odd] += dt[odd];
        if (REVERSE) {
          const float z_t = element(inputs.z[half][lane], odd);
          const float gate = GATE ? driving_t * sigmoid(z_t) * z_t : driving_t;
          drive[half][odd] = split(inside ? gate : 0.f);
        } else {
          drive[half][odd] = split(dt[odd] * driving_t);
        }
      }
      shared.dt[(member + 4 * half) * PITCH + mine.group] = make_float2(dt[0], dt[1]);
    }
#pragma unroll
    for (int octet = 0; octet < 2; octet++) {
      const uint32_t columns = transposed(shared.rows[buffer][octet][lane]);
      row_t[octet][0] = doubled(columns, 0);
      row_t[octet][1] = doubled(columns, 1);
    }
    if (tile + 1 < tiles) stage(REVERSE ? tile_start - TILE : tile_start + TILE, buffer ^ 1);
    __syncwarp();

    // All lanes walk the tile's 8 tokens.
#pragma unroll
    for (int step = 0; step < TILE; step++) {
      const int token = REVERSE ? TILE - 1 - step : step;
      const int half = token >> 2;
      const float2 dt = shared.dt[token * PITCH + mine.group];
#pragma unroll
      for (int octet = 0; octet < 2; octet++) {
        const uint32_t own_row = member == (token & 3) ? row_t[octet][half] : 0u;
        float added[4];
        if (REVERSE) {
          mma_outer(added, drive[half], own_row, h[0][2 * octet], h[0][2 * octet + 1],
                    h[1][2 * octet], h[1][2 * octet + 1]);
        } else {
          mma_outer(added, drive[half], own_row, 0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int odd_state = 0; odd_state < 2; odd_state++) {
          const int state = 2 * octet + odd_state;
          const float decay_even = ex2(dt.x * A[0][state]);
          const float decay_odd = ex2(dt.y * A[1][state]);
          h[0][state] = REVERSE ? decay_even * added[odd_state]
                                : fmaf(decay_even, h[0][state], added[odd_state]);
          h[1][state] = REVERSE ? decay_odd * added[2 + odd_state]
                                : fmaf(decay_odd, h[1][state], added[2 + odd_state]);
        }
      }
    }
    __syncwarp();
  }

  const int64_t place = (int64_t)segment.w * params.channels;
  store_state(params.cut_states + place * N16, h, mine);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    float total = sum[odd];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (member == 0 && mine.live) params.cut_sums[place + mine.channel + odd] = total;
  }
}

constexpr int AHEAD = 8;  // segments whose end states are loaded together

// Replaces ends from zero by starts, segment after segment of a document.
template <bool REVERSE>
__global__ void __launch_bounds__(128) combine(const __grid_constant__ ScanParams params) {
  wait_for_previous();
  const int quad = blockIdx.x * blockDim.x + threadIdx.x;  // 4 states of channel quad / 4
  if (blockIdx.y >= params.schedule.counts[3] || quad >= params.channels * 4) return;
  const int4 pieces = params.schedule.cut_documents[blockIdx.y];
  const int64_t stride = (int64_t)params.channels * 4;  // quads of a state
  const float4* first = (const float4*)(REVERSE ? params.dfinal : params.initial_state);
  float4 h = first ? first[pieces.z * stride + quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  float4 A = ((const float4*)params.A)[quad];
  A.x *= LOG2E;
  A.y *= LOG2E;
  A.z *= LOG2E;
  A.w *= LOG2E;
  for (int base = 0; base < pieces.y; base += AHEAD) {
    float4 end[AHEAD];
    float sum[AHEAD];
    auto place = [&](int n) { return (int64_t)pieces.x + (REVERSE ? pieces.y - 1 - n : n); };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (base + i + 1 < pieces.y) {  // the last has no end state
        end[i] = ((const float4*)params.cut_states)[place(base + i) * stride + quad];
        sum[i] = params.cut_sums[place(base + i) * params.channels + (quad >> 2)];
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (base + i < pieces.y) {
        ((float4*)params.cut_states)[place(base + i) * stride + quad] = h;
        h.x = fmaf(h.x, ex2(sum[i] * A.x), end[i].x);
        h.y = fmaf(h.y, ex2(sum[i] * A.y), end[i].y);
        h.z = fmaf(h.z, ex2(sum[i] * A.z), end[i].z);
        h.w = fmaf(h.w, ex2(sum[i] * A.w), end[i].w);
      }
    }
  }
}

}  // namespace

void scan16_start_states(const ScanParams& params, bool reverse, cudaStream_t stream) {
  const int channel_blocks = (params.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const dim3 pieces(channel_blocks, params.schedule.max_cut_segments);
  const dim3 documents((params.channels * 4 + 127) / 128, params.schedule.max_cut_documents);
  with_switches(params, [&](auto gate, auto softplus) {
    constexpr bool GATE = decltype(gate)::value;
    constexpr bool SOFTPLUS = decltype(softplus)::value;
    (reverse ? piece<true, GATE, SOFTPLUS>
             : piece<false, false, SOFTPLUS>)<<<pieces, WARPS * 32, 0, stream>>>(params);
  });
  launch_behind(reverse ? combine<true> : combine<false>, documents, 128, 0, stream, params);
}

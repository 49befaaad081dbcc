// Forward of the selective scan, bfloat16 with 16 states:
//   dt = softplus(delta + bias);  h_t = exp(dt A) h_{t-1} + dt u B_t;
//   y_t = (C_t . h_t + D u) silu(z).
//
// Who holds what. A block is 4 warps side by side along channels; it takes one item of the schedule
// (a document, a segment of a long one, or several short ones) and never waits for itself:
//
//   blockIdx.y   item               token 0    8    16         (first row of the grid: padding)
//                |  document 0  |        | tile | tile | ...   sequential, to the end of the item
//   blockIdx.x   64 channels
//                warp 0  channels  0 - 15   16 channels x 16 states in registers,
//                warp 1  channels 16 - 31   8 a lane: see scan16.cuh
//                warp 2  channels 32 - 47
//                warp 3  channels 48 - 63
//
//   within a tile   member m of a group   dt, softplus, dt u, gate of tokens m and m + 4, once each
//                   all lanes, 8 times    h = exp(dt A) h + (dt u) (x) B_t   outer product: an MMA
//                                         y_t = sum over states of C_t h     an MMA
//
// Shared memory, per warp: two buffers of a tile's u, delta, z, B, C, which each lane copies ahead
// for itself; dt of the tile, which a group's lanes exchange; bias and D. With COMBINES also the
// state that a segment starts from. No barrier between warps.
//
// A segment after which the document goes on is also walked from zero, one multiply-add more per
// state, so that its end is combined as scan16_cut.cu does it, to the bit.
//
// Bound: special functions. 9.5 operations per 16 channels' token and lane, 8 cycles each: 0.27 ms
// at 16384 tokens of 4096 channels on an H200.
// Bytes per token and channel: u, delta, z, y 2 each, saved states 1; B and C once per 64 channels,
// from L2.
// Registers: 96 with five blocks on a multiprocessor, 128 with four.
#include "scan16.cuh"

namespace {

constexpr int PITCH = 12;  // of a token's dt: no bank conflicts, written or read

struct Inputs {  // of a tile, staged by each lane for itself: pairs of channels by half of the tile
  uint32_t u[2][32];
  uint32_t delta[2][32];
  uint32_t z[2][32];
};
struct Rows {  // the tile's rows of B and C: pairs of states by octet
  uint32_t B[2][32];
  uint32_t C[2][32];
};
struct Shared {  // of a warp; two buffers
  float2 dt[TILE * PITCH];
  Inputs inputs[2];
  Rows rows[2];
  float4 constants[32];  // bias and D of the lane's channels
};

// RESIDENT: blocks of a multiprocessor. Five hide most; where there are few, each is faster with
// the registers of four. COMBINES: whether any segment may have to be walked from zero too.
template <int RESIDENT, bool SAVE, bool COMBINES, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT)
    forward(const __grid_constant__ ScanParams params) {
  __shared__ Shared all_shared[WARPS];
  __shared__ float starts[COMBINES ? WARPS : 1][8][32];  // the state that a segment starts from
  const int number = blockIdx.y - 1;
  if (zero_padding(params, params.y) || number >= params.schedule.counts[0]) return;
  const Lane mine(params.channels);
  const int lane = mine.lane;
  const int member = mine.member;
  Shared& shared = all_shared[threadIdx.x >> 5];
  float A[2][4], h[2][4];
  load_decay(A, params, mine);
  {
    const float2 bias = load_pair(params.bias, mine);
    const float2 D = load_pair(params.D, mine);
    shared.constants[lane] = make_float4(bias.x, bias.y, D.x, D.y);
  }
  const int2 item = params.schedule.items[number];
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = params.schedule.segments[i];
    const int length = segment.y - segment.x;
    const int document = document_of(segment);
    const int before = segment.x - params.starts[document];  // tokens of the document
    if (segment.w >= 0) {
      load_state(h, params.cut_states + states_before(params, segment.w), mine);
    } else if (before > 0) {
      // The segment before ended with it.
    } else if (params.initial_state) {
      load_state(h, params.initial_state + states_before(params, document), mine);
    } else {
      set_zero(h);
    }
    const char* u = slot_address(params.u, segment.x, params.row_length, mine.loaded);
    const char* delta = slot_address(params.delta, segment.x, params.row_length, mine.loaded);
    const char* z =
        GATE ? slot_address(params.z, segment.x, params.row_length, mine.loaded) : nullptr;
    const char* B = slot_address(params.B, segment.x, params.row_length, 2 * member);
    const char* C = slot_address(params.C, segment.x, params.row_length, 2 * member);
    bf16* y = (bf16*)params.y + (int64_t)segment.x * params.channels + mine.channel;

    // Copies a tile ahead. Past the end the segment's last token is read again, and masked when it
    // is used.
    auto stage = [&](int tile_start, int buffer) {
      Inputs& inputs = shared.inputs[buffer];
      Rows& rows = shared.rows[buffer];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int token = min(tile_start + member + 4 * half, length - 1);
        copy4(&inputs.u[half][lane], token_address(u, params.u, token));
        copy4(&inputs.delta[half][lane], token_address(delta, params.delta, token));
        if (GATE) copy4(&inputs.z[half][lane], token_address(z, params.z, token));
      }
      const int token = min(tile_start + mine.column_token, length - 1);
      const char* row_of_B = token_address(B, params.B, token);
      const char* row_of_C = token_address(C, params.C, token);
#pragma unroll
      for (int octet = 0; octet < 2; octet++) {
        copy4(&rows.B[octet][lane], row_of_B + 16 * octet);
        copy4(&rows.C[octet][lane], row_of_C + 16 * octet);
      }
      copies_issued();
    };

    const bool ends = segment.y == params.ends[document];
    auto walk = [&](auto combined) {
      constexpr bool COMBINED = decltype(combined)::value;
      float from_zero[2][4];
      float sum[2] = {};  // of the lane's tokens' dt
      set_zero(from_zero);
      if (COMBINED) {
#pragma unroll
        for (int state = 0; state < 8; state++)
          starts[threadIdx.x >> 5][state][lane] = h[state >> 2][state & 3];
      }
      stage(0, 0);
      int buffer = 0;
      for (int tile_start = 0; tile_start < length; tile_start += TILE, buffer ^= 1) {
        const Inputs& inputs = shared.inputs[buffer];
        const Rows& rows = shared.rows[buffer];

        // Each lane prepares its two tokens of its two channels.
        copies_arrived();
        uint32_t drive[2][2];  // dt u, split, by half and channel
        const float4 constants = shared.constants[lane];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const bool inside = tile_start + member + 4 * half < length;
          float dt[2];
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            float unused;
            const float raw =
                element(inputs.delta[half][lane], odd) + (odd ? constants.y : constants.x);
            dt[odd] = SOFTPLUS ? softplus(raw, unused) : raw;
            dt[odd] = inside ? dt[odd] : 0.f;
            drive[half][odd] = split(dt[odd] * element(inputs.u[half][lane], odd));
            if (COMBINED) sum[odd] += dt[odd];
          }
          shared.dt[(member + 4 * half) * PITCH + mine.group] = make_float2(dt[0], dt[1]);
        }
        uint32_t B_t[2][2];  // of the token that the lane owns, by octet and half
#pragma unroll
        for (int octet = 0; octet < 2; octet++) {
          const uint32_t columns = transposed(rows.B[octet][lane]);
          B_t[octet][0] = doubled(columns, 0);
          B_t[octet][1] = doubled(columns, 1);
        }
        const uint32_t C0 = rows.C[0][lane];
        const uint32_t C1 = rows.C[1][lane];
        if (tile_start + TILE < length) stage(tile_start + TILE, buffer ^ 1);
        const int position = before + tile_start;
        if (SAVE && position % SAVE_EVERY == 0 && position > 0 && mine.live) {
          uint32_t quad[4];
          pack_state(quad, h);
          *saved_state(params, segment.x - before, position, mine) =
              make_uint4(quad[0], quad[1], quad[2], quad[3]);
        }
        __syncwarp();

        // All lanes walk the tile's 8 tokens; each keeps the sums of its own.
        float y_even[2], y_odd[2];  // C . h by half
#pragma unroll
        for (int token = 0; token < TILE; token++) {
          const int half = token >> 2;
          const bool own = member == (token & 3);
          advance<COMBINED>(h, from_zero, shared.dt[token * PITCH + mine.group], A, drive[half],
                            B_t, token, member);
          float sums[4];
          mma_tf32(sums, h[0][0], h[1][0], h[0][1], h[1][1], low(C0), high(C0), 0.f, 0.f, 0.f, 0.f);
          mma_tf32(sums, h[0][2], h[1][2], h[0][3], h[1][3], low(C1), high(C1), sums[0], sums[1],
                   sums[2], sums[3]);
          if (own) {
            y_even[half] = sums[half];
            y_odd[half] = sums[2 + half];
          }
        }

        // Skip, gate and store.
        const float4 skip = shared.constants[lane];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (tile_start + member + 4 * half < length && mine.live) {
            const uint32_t u_t = inputs.u[half][lane];
            float even = fmaf(skip.z, low(u_t), y_even[half] * TF32_FIX);
            float odd = fmaf(skip.w, high(u_t), y_odd[half] * TF32_FIX);
            if (GATE) {
              const uint32_t z_t = inputs.z[half][lane];
              even *= low(z_t) * sigmoid(low(z_t));
              odd *= high(z_t) * sigmoid(high(z_t));
            }
            const uint32_t token = tile_start + member + 4 * half;
            *(uint32_t*)(y + (uint64_t)token * (uint32_t)params.channels) = pack(even, odd);
          }
        }
        __syncwarp();
      }
      if (COMBINED) {
        float start[2][4];
#pragma unroll
        for (int state = 0; state < 8; state++)
          start[state >> 2][state & 3] = starts[threadIdx.x >> 5][state][lane];
        combine_segment(h, start, from_zero, sum, A);
      }
    };
    if (COMBINES && segment.z & ENDS_AT_CUT &&
        (ends ? params.final_state != nullptr : segment.w < 0))
      walk(Switch<COMBINES>());
    else
      walk(Switch<false>());
    if (params.final_state && ends)
      store_state(params.final_state + states_before(params, document), h, mine);
  }
}

}  // namespace

void scan16_start_states(const ScanParams& params, bool reverse, cudaStream_t stream);

void scan16_forward(const ScanParams& params, cudaStream_t stream) {
  if (params.schedule.max_cut_segments) scan16_start_states(params, false, stream);
  const int channel_blocks = (params.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const dim3 grid(channel_blocks, params.schedule.max_items + 1);
  const bool few = (int64_t)grid.x * params.documents <= 1024;
  with_switches(params, [&](auto gate, auto softplus) {
    constexpr bool GATE = decltype(gate)::value;
    constexpr bool SOFTPLUS = decltype(softplus)::value;
    auto run = [&](auto combines) {
      constexpr bool COMBINES = decltype(combines)::value;
      auto kernel = forward<5, false, COMBINES, GATE, SOFTPLUS>;
      if (params.saved) {
        kernel = few ? forward<4, true, COMBINES, GATE, SOFTPLUS>
                     : forward<5, true, COMBINES, GATE, SOFTPLUS>;
      }
      kernel<<<grid, WARPS * 32, 0, stream>>>(params);
    };
    if (params.schedule.combines)
      run(Switch<true>());
    else
      run(Switch<false>());
  });
}

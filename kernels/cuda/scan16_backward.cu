// Backward of the selective scan, bfloat16 with 16 states. With g the gradient before the gate,
// g_t = dy_t silu(z_t), and a_t = exp(dt_t A), from a document's last token to its first:
//
//   x_t  = carry + g_t C_t         gradient of h_t; carry begins as that of the final state
//   dC_t = sum over channels of g_t h_t             dB_t = sum over channels of x_t dt_t u_t
//   carry = x_t a_t                                 dA  += carry h_{t-1} dt_t
//   dw_t = sum over states of x_t B_t               gradient of dt_t u_t
//   du_t = dw_t dt_t + g_t D                        dD  += g_t u_t
//   d dt_t = dw_t u_t + sum over states of carry h_{t-1} A;  ddelta = d dt softplus'(.)
//
// Who holds what. A block is 4 warps, 64 channels, with one item of the schedule; it walks the
// item's segments back in chunks of SAVE_EVERY = 32 tokens, and a chunk twice:
//
//   blockIdx.y   item (first row of the grid: padding)     blockIdx.x   64 channels, 16 a warp
//
//   token of the document   0        32       64       96
//                           | chunk  | chunk  | chunk  |
//                           ^ start  ^ saved  ^ saved    bfloat16 states, written by the forward
//
//   replay      >>>>>>>>    4 tiles of 8 tokens from the saved state; keeps the states in
//                           shared memory, and what each token is (tiles[4])
//   walk back   <<<<<<<<    4 tiles, each in halves of 4 tokens (half 1, then half 0):
//                             read_states   h_{t-1} for the walk, dC from h_t
//                             walk          x, carry, dA, dw; x_t takes the place of h_t
//                             sum_B         dB from x_t
//   sum         block       dB and dC over the 4 warps: one warp a token, one lane a column
//
// The lane layout is scan16.cuh's. States lie in shared memory as bfloat16 in the order of an MMA's
// A operand: they are never a recurrence's input. dB and dC, sums over channels, are MMAs against
// them transposed, by ldmatrix. What a block has of dB and dC is one partial, which scan_reduce
// sums over blocks: no atomics, the same bits every time.
//
// Shared memory: 112.5 KiB a block, two blocks a multiprocessor.
//   warp    states of 33 places (16.5 KiB), tiles (8 KiB), inputs copied ahead (1 KiB), the next
//           saved state, bias and D (0.6 KiB), the gradient that a segment starts from (1 KiB)
//   block   B and C of this chunk and of the next (4 KiB)
//
// Bound: issue, about 170 instructions per 16 channels' token, 4 schedulers; 0.78 ms at 16384
// tokens of 4096 channels on an H200.
// Bytes per token and channel: u, delta, z, dy, du, ddelta, dz 2 each, saved states 1, partials of
// dB and dC 2 written and 2 read.
// Registers: 231 to 255; up to 88 bytes of stack where a segment may be walked from zero too.
#include "scan16.cuh"

namespace {

constexpr int TILES = SAVE_EVERY / TILE;  // of a chunk
constexpr int SUM_PITCH = 40;  // of a token's [dB | dC] when warps are summed: no bank conflicts

struct Tile {           // by lane, but for dt: what it knows of its 2 tokens x 2 channels
  float4 gate[32];      // g, the gradients before the gate
  float4 slope[32];     // d dt / d delta
  float2 dt[TILE * 8];  // by token and lane group
  uint2 drive[32];      // dt u as bf16
  uint32_t u[2][32];    // by half of the tile
};

struct Inputs {  // of the next tile, staged by each lane for itself, by half of the tile
  uint32_t u[2][32];
  uint32_t delta[2][32];
  uint32_t z[2][32];
  uint32_t dy[2][32];
};

struct Warp {
  // Before the chunk's first token, after it, ...: four 8 x 8 matrices each.
  uint4 states[SAVE_EVERY + 1][32];
  Tile tiles[TILES];
  Inputs inputs;
  uint4 saved[32];      // the next chunk's saved state
  float4 constants[8];  // bias and D of a lane group's channels
  // Once a tile has been walked, its states' place holds this warp's share of dB and dC.
  __device__ float* sums(int tile) { return (float*)states[tile * TILE + 1]; }
};

struct Rows {  // a tile's rows of B and C by octet, in the order of the lanes that read them
  uint32_t B[2][32];
  uint32_t C[2][32];
};

struct Block {
  Warp warps[WARPS];
  Rows rows[2][TILES];  // of this chunk and the next
};

using Starts = float[8][32];

// COMBINES: whether any segment may have to be walked from zero too.
template <bool COMBINES, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, 2)
    backward(const __grid_constant__ ScanParams params) {
  extern __shared__ __align__(16) char dynamic[];
  let_next_start();
  const int number = blockIdx.y - 1;
  if (zero_padding(params, params.du, params.ddelta, params.dz, params.dz_token, params.y) ||
      number >= params.schedule.counts[0])
    return;
  Block& block = *(Block*)dynamic;
  const Lane mine(params.channels);
  const int lane = mine.lane;
  const int group = mine.group;
  const int member = mine.member;
  const int warp_number = threadIdx.x >> 5;
  Warp& warp = block.warps[warp_number];
  // The gradient that a segment starts from.
  float (*const starts)[32] = ((Starts*)(dynamic + sizeof(Block)))[warp_number];
  // Which row of a token's four 8 x 8 matrices this lane addresses for ldmatrix: states 0-7 | 8-15
  // by even | odd channels.
  const int matrix_row = (lane & 7) + 8 * (((lane >> 3) & 1) * 2 + (lane >> 4));
  float A[2][4], dA[2][4], carry[2][4];
  float dD[2] = {};
  float dbias[2] = {};
  load_decay(A, params, mine);
  set_zero(dA);
  {
    const float2 bias = load_pair(params.bias, mine);
    const float2 D = load_pair(params.D, mine);
    warp.constants[group] = make_float4(bias.x, bias.y, D.x, D.y);
  }
  const int2 item = params.schedule.items[number];
  int parity = 0;  // of the chunk: which of the two buffers has its B and C
  for (int i = item.y - 1; i >= item.x; i--) {
    const int4 segment = params.schedule.segments[i];
    const int length = segment.y - segment.x;
    const int document = document_of(segment);
    const int before = segment.x - params.starts[document];  // tokens of the document
    const int64_t document_state = states_before(params, document);
    if (segment.w >= 0) {
      load_state(carry, params.cut_states + states_before(params, segment.w), mine);
    } else if (segment.y < params.ends[document]) {
      // The segment behind began with it.
    } else if (params.dfinal) {
      load_state(carry, params.dfinal + document_state, mine);
    } else {
      set_zero(carry);
    }
    if (!mine.live) set_zero(carry);
    const char* u = slot_address(params.u, segment.x, params.row_length, mine.loaded);
    const char* delta = slot_address(params.delta, segment.x, params.row_length, mine.loaded);
    const char* z =
        GATE ? slot_address(params.z, segment.x, params.row_length, mine.loaded) : nullptr;
    const char* dy = slot_address(params.dy, segment.x, params.row_length, mine.loaded);
    const char* B = slot_address(params.B, segment.x, params.row_length, 2 * member);
    const char* C = slot_address(params.C, segment.x, params.row_length, 2 * member);
    const int64_t output = (int64_t)segment.x * params.channels + mine.channel;
    char* const du = (char*)((bf16*)params.du + output);
    char* const ddelta = (char*)((bf16*)params.ddelta + output);
    char* const dz = (char*)((bf16*)params.dz + segment.x * params.dz_token + mine.channel);
    char* const y = (char*)((bf16*)params.y + output);
    float* const partial =
        params.partial_BC + (blockIdx.x * params.slots() + segment.x) * 2 * N16 + lane;

    // Copies a tile ahead. Past the end the segment's last token is read again, and masked when it
    // is used.
    auto stage = [&](int tile_start) {
      Inputs& inputs = warp.inputs;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int token = min(tile_start + member + 4 * half, length - 1);
        copy4(&inputs.u[half][lane], token_address(u, params.u, token));
        copy4(&inputs.delta[half][lane], token_address(delta, params.delta, token));
        if (GATE) copy4(&inputs.z[half][lane], token_address(z, params.z, token));
        copy4(&inputs.dy[half][lane], token_address(dy, params.dy, token));
      }
      copies_issued();
    };

    // Copies B and C of a chunk for the whole block, a tile a warp, and its first tile.
    auto stage_chunk = [&](int chunk_start) {
      static_assert(TILES == WARPS);
      parity ^= 1;
      const int token = min(chunk_start + TILE * warp_number + mine.column_token, length - 1);
      const char* row_of_B = token_address(B, params.B, token);
      const char* row_of_C = token_address(C, params.C, token);
      Rows& rows = block.rows[parity][warp_number];
#pragma unroll
      for (int octet = 0; octet < 2; octet++) {
        copy4(&rows.B[octet][lane], row_of_B + 16 * octet);
        copy4(&rows.C[octet][lane], row_of_C + 16 * octet);
      }
      if (before + chunk_start > 0) {
        copy16(&warp.saved[lane],
               saved_state(params, segment.x - before, before + chunk_start, mine));
      }
      stage(chunk_start);
    };

    auto walk_segment = [&](auto combined) {
      constexpr bool COMBINED = decltype(combined)::value;
      float from_zero[2][4];
      float sum[2] = {};  // of the lane's tokens' dt
      set_zero(from_zero);
      if (COMBINED) {
#pragma unroll
        for (int state = 0; state < 8; state++)
          starts[state][lane] = carry[state >> 2][state & 3];
      }
      stage_chunk((length - 1) / SAVE_EVERY * SAVE_EVERY);
      for (int chunk_start = (length - 1) / SAVE_EVERY * SAVE_EVERY; chunk_start >= 0;
           chunk_start -= SAVE_EVERY) {
        const int tiles = (min(SAVE_EVERY, length - chunk_start) + TILE - 1) / TILE;
        const Rows(&rows)[TILES] = block.rows[parity];

        // Replay the chunk from its saved state.
        {
          float h[2][4];
          uint32_t quad[4];
          copies_arrived();
          if (before + chunk_start > 0) {
            const uint4 saved = warp.saved[lane];
            quad[0] = saved.x;
            quad[1] = saved.y;
            quad[2] = saved.z;
            quad[3] = saved.w;
            unpack_state(h, quad);
          } else {
            if (params.initial_state)
              load_state(h, params.initial_state + document_state, mine);
            else
              set_zero(h);
            pack_state(quad, h);
            // Rounded, as a pass that was not split has it saved.
            if (COMBINES && segment.z & STARTS_AT_CUT) unpack_state(h, quad);
          }
          __syncthreads();  // other warps have summed the previous chunk; B and C are there
          put_quad(warp.states[0], lane, quad);
          for (int tile = 0; tile < tiles; tile++) {
            const int tile_start = chunk_start + tile * TILE;
            Tile& here = warp.tiles[tile];
            const Inputs& inputs = warp.inputs;

            // Each lane prepares its two tokens of its two channels.
            copies_arrived();
            uint32_t split_drive[2][2], B_t[2][2], C_rows[2], u_t[2];
            float dgate[2][2], silu[2][2];  // d out / d z and out, but for the ungated y
            {
              const float4 constants = warp.constants[group];
              float gate[2][2], slope[2][2], drive[2][2];
#pragma unroll
              for (int half = 0; half < 2; half++) {
                const bool inside = tile_start + member + 4 * half < length && mine.live;
                const uint32_t z_pair = inputs.z[half][lane];
                const uint32_t dy_pair = inputs.dy[half][lane];
                const uint32_t delta_pair = inputs.delta[half][lane];
                u_t[half] = inputs.u[half][lane];
                float dt[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                  const float raw = element(delta_pair, odd) + (odd ? constants.y : constants.x);
                  const float dy_t = inside ? element(dy_pair, odd) : 0.f;
                  if (SOFTPLUS) {
                    float power;
                    dt[odd] = softplus(raw, power);
                    slope[half][odd] = (raw >= 0.f ? 1.f : power) * rcp(1.f + power);
                  } else {
                    dt[odd] = raw;
                    slope[half][odd] = 1.f;
                  }
                  dt[odd] = inside ? dt[odd] : 0.f;
                  drive[half][odd] = dt[odd] * element(u_t[half], odd);
                  split_drive[half][odd] = split(drive[half][odd]);
                  float g = dy_t;
                  if (GATE) {
                    const float z_t = element(z_pair, odd);
                    const float sigmoid_z = sigmoid(z_t);
                    const float dy_sigmoid = dy_t * sigmoid_z;
                    g = dy_sigmoid * z_t;
                    dgate[half][odd] = dy_sigmoid * fmaf(z_t, 1.f - sigmoid_z, 1.f);
                    silu[half][odd] = sigmoid_z * z_t;
                  }
                  gate[half][odd] = g;
                }
                here.dt[(member + 4 * half) * 8 + group] = make_float2(dt[0], dt[1]);
                here.u[half][lane] = u_t[half];
              }
              here.gate[lane] = make_float4(gate[0][0], gate[0][1], gate[1][0], gate[1][1]);
              here.drive[lane] =
                  make_uint2(pack(drive[0][0], drive[1][0]), pack(drive[0][1], drive[1][1]));
              here.slope[lane] = make_float4(slope[0][0], slope[0][1], slope[1][0], slope[1][1]);
            }
#pragma unroll
            for (int octet = 0; octet < 2; octet++) {
              C_rows[octet] = rows[tile].C[octet][lane];
              const uint32_t columns = transposed(rows[tile].B[octet][lane]);
              B_t[octet][0] = doubled(columns, 0);
              B_t[octet][1] = doubled(columns, 1);
            }
            if (tile + 1 < tiles)
              stage(tile_start + TILE);
            else if (chunk_start > 0)
              stage_chunk(chunk_start - SAVE_EVERY);
            __syncwarp();

            // All lanes walk the tile's 8 tokens and keep the states.
            float2 dt[TILE];
            float out[2][2];  // C . h of the lane's tokens
#pragma unroll
            for (int token = 0; token < TILE; token++)
              dt[token] = here.dt[token * 8 + group];
#pragma unroll
            for (int token = 0; token < TILE; token++) {
              const int half = token >> 2;
              const bool own = member == (token & 3);
              advance<false>(h, h, dt[token], A, split_drive[half], B_t, token, member);
              pack_state(quad, h);
              put_quad(warp.states[tile * TILE + token + 1], lane, quad);
              if (GATE) {
                float sums[4];
                mma_bf16(sums, quad, C_rows[0], C_rows[1]);
                if (own) {
                  out[half][0] = sums[half];
                  out[half][1] = sums[2 + half];
                }
              }
            }

            // dz, and y where it is wanted again.
            if (GATE) {
              const float4 constants = warp.constants[group];
#pragma unroll
              for (int half = 0; half < 2; half++) {
                if (tile_start + member + 4 * half < length && mine.live) {
                  const uint64_t token = tile_start + member + 4 * half;
                  const float even = fmaf(constants.z, low(u_t[half]), out[half][0]);
                  const float odd = fmaf(constants.w, high(u_t[half]), out[half][1]);
                  *(uint32_t*)(dz + token * (uint32_t)(2 * params.dz_token)) =
                      pack(dgate[half][0] * even, dgate[half][1] * odd);
                  if (params.y) {
                    *(uint32_t*)(y + token * (uint32_t)(2 * params.channels)) =
                        pack(silu[half][0] * even, silu[half][1] * odd);
                  }
                }
              }
            }
          }
        }

        // Walk the chunk back.
        for (int tile = tiles - 1; tile >= 0; tile--) {
          const int tile_start = chunk_start + tile * TILE;
          Tile& here = warp.tiles[tile];
          if (COMBINED) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const float2 own_dt = here.dt[(member + 4 * half) * 8 + group];
              sum[0] += own_dt.x;
              sum[1] += own_dt.y;
            }
          }
          uint32_t gate[2][2], C_t[2][2], B_rows[2], gate_columns[2], drive_columns[2];
          {
            const float4 gates = here.gate[lane];
            const uint2 drive = here.drive[lane];
            gate[0][0] = split(gates.x);
            gate[0][1] = split(gates.y);
            gate[1][0] = split(gates.z);
            gate[1][1] = split(gates.w);
            gate_columns[0] = transposed(pack(gates.x, gates.z));
            gate_columns[1] = transposed(pack(gates.y, gates.w));
            drive_columns[0] = transposed(drive.x);
            drive_columns[1] = transposed(drive.y);
#pragma unroll
            for (int octet = 0; octet < 2; octet++) {
              B_rows[octet] = rows[tile].B[octet][lane];
              const uint32_t columns = transposed(rows[tile].C[octet][lane]);
              C_t[octet][0] = doubled(columns, 0);
              C_t[octet][1] = doubled(columns, 1);
            }
          }
          // Of the lane's tokens: by half and channel; by octet and half.
          float dw[2][2], ddt[2][2], dB[4], dC[4];
          __syncwarp();
          // A half tile's shared reads stand between the other half's arithmetic, so that neither
          // waits.
          float2 dt[2][4];
          uint32_t states_before_token[2][4][4];

          // Reads a half's states, and dC from them.
          auto read_states = [&](int half) {
            const uint4* const places = warp.states[tile * TILE + 4 * half];
#pragma unroll
            for (int token = 0; token < 4; token++)
              dt[half][token] = here.dt[(4 * half + token) * 8 + group];
#pragma unroll
            for (int token = 0; token < 4; token++) {
              uint32_t quad[4];
              float sums[4];
              get_quad(states_before_token[half][token], places + token * 32, lane);
              load_transposed(quad, shared_address(places + (token + 1) * 32 + matrix_row));
              mma_bf16(sums, quad, gate_columns[0], gate_columns[1]);
              if (member == token) {
                dC[half] = sums[half];
                dC[2 + half] = sums[2 + half];
              }
            }
          };

          // Walks a half back; gradients of states take the places of the states after a token.
          auto walk = [&](int half) {
            uint4* const places = warp.states[tile * TILE + 4 * half];
#pragma unroll
            for (int token = 3; token >= 0; token--) {
              const bool own = member == token;
              uint32_t quad[4];
              float h[2][4], x[2][4];
              float ddecay[2] = {};  // sum over states of carry h A
              unpack_state(h, states_before_token[half][token]);
              // x = carry + g C, the state's gradient.
#pragma unroll
              for (int octet = 0; octet < 2; octet++) {
                const uint32_t C_own = own ? C_t[octet][half] : 0u;
                float sums[4];
                mma_outer(sums, gate[half], C_own, carry[0][2 * octet], carry[0][2 * octet + 1],
                          carry[1][2 * octet], carry[1][2 * octet + 1]);
                x[0][2 * octet] = sums[0];
                x[0][2 * octet + 1] = sums[1];
                x[1][2 * octet] = sums[2];
                x[1][2 * octet + 1] = sums[3];
                if (COMBINED) {
                  mma_outer(sums, gate[half], C_own, from_zero[0][2 * octet],
                            from_zero[0][2 * octet + 1], from_zero[1][2 * octet],
                            from_zero[1][2 * octet + 1]);
                  from_zero[0][2 * octet] = sums[0];
                  from_zero[0][2 * octet + 1] = sums[1];
                  from_zero[1][2 * octet] = sums[2];
                  from_zero[1][2 * octet + 1] = sums[3];
                }
              }
#pragma unroll
              for (int state = 0; state < 4; state++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                  const float dt_t = odd ? dt[half][token].y : dt[half][token].x;
                  const float decay = ex2(dt_t * A[odd][state]);
                  carry[odd][state] = x[odd][state] * decay;
                  if (COMBINED) from_zero[odd][state] *= decay;
                  const float carry_h = carry[odd][state] * h[odd][state];
                  dA[odd][state] = fmaf(carry_h, dt_t, dA[odd][state]);
                  ddecay[odd] = fmaf(carry_h, A[odd][state], ddecay[odd]);
                }
              float dw_sums[4], ddt_sums[4];
              pack_state(quad, x);
              mma_bf16(dw_sums, quad, B_rows[0], B_rows[1]);
              mma_group_sum(ddt_sums, ddecay[0], ddecay[1], LN2_TF32);
              if (own) {
                dw[half][0] = dw_sums[half];
                dw[half][1] = dw_sums[2 + half];
                ddt[half][0] = ddt_sums[0];
                ddt[half][1] = ddt_sums[2];
              }
              put_quad(places + (token + 1) * 32, lane, quad);
            }
          };

          // dB from a half's gradients of states.
          auto sum_B = [&](int half) {
            const uint4* const places = warp.states[tile * TILE + 4 * half];
#pragma unroll
            for (int token = 3; token >= 0; token--) {
              uint32_t quad[4];
              float sums[4];
              load_transposed(quad, shared_address(places + (token + 1) * 32 + matrix_row));
              mma_bf16(sums, quad, drive_columns[0], drive_columns[1]);
              if (member == token) {
                dB[half] = sums[half];
                dB[2 + half] = sums[2 + half];
              }
            }
          };
          read_states(1);
          __syncwarp();
          walk(1);
          __syncwarp();
          sum_B(1);
          read_states(0);
          __syncwarp();
          walk(0);
          __syncwarp();
          sum_B(0);
          __syncwarp();

          float* sums = warp.sums(tile) + member * SUM_PITCH + group;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            sums[4 * half * SUM_PITCH] = dB[half];
            sums[4 * half * SUM_PITCH + 8] = dB[2 + half];
            sums[4 * half * SUM_PITCH + 16] = dC[half];
            sums[4 * half * SUM_PITCH + 24] = dC[2 + half];
          }

          // du and ddelta of the lane's tokens.
          {
            const float4 constants = warp.constants[group];
            const float4 slopes = here.slope[lane];
            const float4 gates = here.gate[lane];
            const float gate[2][2] = {{gates.x, gates.y}, {gates.z, gates.w}};
            const float slope[2][2] = {{slopes.x, slopes.y}, {slopes.z, slopes.w}};
#pragma unroll
            for (int half = 0; half < 2; half++) {
              if (tile_start + member + 4 * half < length && mine.live) {
                const float2 own_dt = here.dt[(member + 4 * half) * 8 + group];
                const uint32_t u_pair = here.u[half][lane];
                float du_t[2], ddelta_t[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                  const float u_t = element(u_pair, odd);
                  const float g = gate[half][odd];
                  const float D = odd ? constants.w : constants.z;
                  ddelta_t[odd] = fmaf(dw[half][odd], u_t, ddt[half][odd]) * slope[half][odd];
                  du_t[odd] = fmaf(dw[half][odd], odd ? own_dt.y : own_dt.x, g * D);
                  dbias[odd] += ddelta_t[odd];
                  dD[odd] = fmaf(g, u_t, dD[odd]);
                }
                const uint32_t token = tile_start + member + 4 * half;
                const uint64_t offset = (uint64_t)token * (uint32_t)(2 * params.channels);
                *(uint32_t*)(du + offset) = pack(du_t[0], du_t[1]);
                *(uint32_t*)(ddelta + offset) = pack(ddelta_t[0], ddelta_t[1]);
              }
            }
          }
        }

        // Sum dB and dC over the block's warps: one warp a token, one lane a column of [dB | dC].
        __syncthreads();
        float* const partials =
            partial + (uint64_t)(uint32_t)(chunk_start + warp_number) * (2 * N16);
        auto sum_warps = [&](int token) {
          float total = 0.f;
#pragma unroll
          for (int other = 0; other < WARPS; other++) {
            total += block.warps[other].sums(token /
                                             TILE)[(token % TILE + warp_number) * SUM_PITCH + lane];
          }
          partials[token * 2 * N16] = total;
        };
        if (chunk_start + SAVE_EVERY <= length) {
#pragma unroll
          for (int token = 0; token < SAVE_EVERY; token += WARPS)
            sum_warps(token);
        } else {
          for (int token = 0; chunk_start + warp_number + token < length; token += WARPS)
            sum_warps(token);
        }
      }
      if (COMBINED) {
        float start[2][4];
#pragma unroll
        for (int state = 0; state < 8; state++)
          start[state >> 2][state & 3] = starts[state][lane];
        combine_segment(carry, start, from_zero, sum, A);
      }
    };
    // Walked from zero too where somebody reads the gradient at its start, and scan16_cut.cu has
    // not walked it so.
    if (COMBINES && segment.z & STARTS_AT_CUT &&
        (before > 0 ? segment.w < 0 : params.dinitial != nullptr))
      walk_segment(Switch<COMBINES>());
    else
      walk_segment(Switch<false>());
    if (params.dinitial && before == 0) store_state(params.dinitial + document_state, carry, mine);
  }

  const int64_t place = (int64_t)number * params.channels;
  store_state(params.partial_A + place * N16, dA, mine);
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    float sum_D = dD[odd];
    float sum_bias = dbias[odd];
    sum_D += __shfl_xor_sync(~0u, sum_D, 1);
    sum_D += __shfl_xor_sync(~0u, sum_D, 2);
    sum_bias += __shfl_xor_sync(~0u, sum_bias, 1);
    sum_bias += __shfl_xor_sync(~0u, sum_bias, 2);
    if (member == 0 && mine.live) {
      params.partial_D[place + mine.channel + odd] = sum_D;
      params.partial_bias[place + mine.channel + odd] = sum_bias;
    }
  }
}

}  // namespace

void scan16_start_states(const ScanParams& params, bool reverse, cudaStream_t stream);

void scan16_backward(const ScanParams& params, cudaStream_t stream) {
  if (params.schedule.max_cut_segments) scan16_start_states(params, true, stream);
  const int channel_blocks = (params.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const dim3 grid(channel_blocks, params.schedule.max_items + 1);
  constexpr int bytes = sizeof(Block) + WARPS * sizeof(Starts);
  static_assert(bytes <= 113 * 1024);  // BACKWARD_SHARED_BYTES in packmamba/ops/scan.py
  with_switches(params, [&](auto gate, auto softplus) {
    constexpr bool GATE = decltype(gate)::value;
    constexpr bool SOFTPLUS = decltype(softplus)::value;
    const auto kernel =
        params.schedule.combines ? backward<true, GATE, SOFTPLUS> : backward<false, GATE, SOFTPLUS>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, WARPS * 32, bytes, stream>>>(params);
  });
  scan_reduce(params, grid.x, stream);
}

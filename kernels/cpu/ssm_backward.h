// The selective scan, backward: chunks of a document from its last to its first, each replayed from
// its saved state, then walked back. With g the gradient before the gate, a = exp(dt A) and carry
// first the gradient of the final state:
//   dh = g C + carry;  dC += g h;  dB += dh dt u;  carry = dh a;
//   ddt = sum_n carry h_prev A + u sum_n dh B;  du = dt sum_n dh B + g D;  dA += carry h_prev dt;
//   dD += g u.
//
//   work item    a segment of documents, walked back, x a group of channels
//     document     the group's carries chosen: dfinal, or zero
//       chunk        from the last to the first; B and C widened once
//         block        u, dt, dt u, z, g of its tokens in vectors; rows of the chunk
//                      before prefetched
//           tile         up to 8 states: 32 states of h and a kept, in the first-level cache
//         sums         dB and dC of the chunk: over lanes, into the group's partial
//
// dB and dC are summed over the blocks of a work item lane by lane, then over lanes, then over
// groups; dA, dD and dbias over the documents of a segment, then over segments. Every order is
// fixed by the layout.
//
// Bound: ssm.h. Bytes, beside ssm.h's: partials of dB and dC, one number of the accumulation type
// each per token, state and group of channels, written and read once; of dA, dD and dbias, one each
// a segment.
#pragma once
#include "ssm.h"

namespace packmamba {

// What a block's tokens of one chunk exchange with its tiles.
template <class R>
struct BackwardTokens {
  Vec<R> g[kChunk];      // the gradient before the gate
  Vec<R> y[kChunk];      // before the gate, for dz
  Vec<R> sum_B[kChunk];  // sum_n dh B
  Vec<R> sum_A[kChunk];  // sum_n carry h_prev A
};

// `count` states of one block: replays the chunk's tokens from `state`, then walks back.
template <int count, class R>
void backward_tile(int tokens, const Tokens<R>& in, BackwardTokens<R>& io, const Vec<R>* state,
                   Vec<R>* carry, const Vec<R>* A, Vec<R>* dA, const R* B, const R* C, Vec<R>* dB,
                   Vec<R>* dC, int64_t states, bool needs_y) {
  using V = Vec<R>;
  V h[kChunk + 1][count], decay[kChunk][count];
  {
    constexpr int n = std::min(count, kTogether);
    V fraction[count], exponent[count];
    std::copy(state, state + count, h[0]);
    for (int token = 0; token < tokens; ++token) {
      const V scaled_dt = in.dt[token] * R(1.4426950408889634);
      const V drive = in.drive[token];
#pragma GCC unroll 1
      for (int i = 0; i < count; i += n) {
        V power[n];
        SIDE_BY_SIDE power[j] = scaled_dt * A[i + j];
        split_exp2<n>(power, fraction + i, exponent + i);
      }
#pragma GCC unroll 1
      for (int i = 0; i < count; i += n) {
        V a[n];
        join_exp2<n>(fraction + i, exponent + i, a);
        SIDE_BY_SIDE a[j] = fraction[i + j] == fraction[i + j] ? a[j] : fraction[i + j];
        SIDE_BY_SIDE decay[token][i + j] = a[j];
        SIDE_BY_SIDE h[token + 1][i + j] =
            a[j] * h[token][i + j] + drive * B[token * states + i + j];
      }
    }
  }
  if (needs_y) {
    for (int token = 0; token < tokens; ++token) {
      V sum = io.y[token];
#pragma GCC unroll 16
      for (int n = 0; n < count; ++n)
        sum += h[token + 1][n] * C[token * states + n];
      io.y[token] = sum;
    }
  }
  V back[count], dA_sum[count];
#pragma GCC unroll 16
  for (int n = 0; n < count; ++n) {
    back[n] = carry[n];
    dA_sum[n] = dA[n];
  }
  for (int token = tokens - 1; token >= 0; --token) {
    const V g = io.g[token];
    const V drive = in.drive[token];
    const V dt = in.dt[token];
    V sum_B = io.sum_B[token];
    V sum_A = io.sum_A[token];
#pragma GCC unroll 16
    for (int n = 0; n < count; ++n) {
      const int64_t i = token * states + n;
      dC[i] += g * h[token + 1][n];
      const V dh = g * C[i] + back[n];
      dB[i] += dh * drive;
      sum_B += dh * B[i];
      back[n] = dh * decay[token][n];
      const V carry_h = back[n] * h[token][n];
      sum_A += carry_h * A[n];
      dA_sum[n] += carry_h * dt;
    }
    io.sum_B[token] = sum_B;
    io.sum_A[token] = sum_A;
  }
#pragma GCC unroll 16
  for (int n = 0; n < count; ++n) {
    carry[n] = back[n];
    dA[n] = dA_sum[n];
  }
}

template <class T>
void scan_backward(const ScanArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal,
                   const accumulate_t<T>* saved, const ScanGradients<T>& out) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  constexpr int lanes = kLanes<R>;
  const Documents& documents = in.documents;
  const int64_t states = in.states;
  const int64_t channels = in.channels;
  const int64_t padded = (channels + kPaddedChannels - 1) / kPaddedChannels * kPaddedChannels;
  const int64_t saved_size = padded * states;
  const ChannelGroups<R> groups(channels);
  const auto segments = join_documents(documents, kSegmentTokens);
  const auto order = longest_first(segments);
  const auto A = blocks_of_A(in.A, channels, states, R(1));
  const int64_t parts = int64_t(segments.size());
  // Not initialised: every real token and every channel of a segment is written once.
  const std::unique_ptr<R[]> part_B(new R[groups.count * documents.slots * states]);
  const std::unique_ptr<R[]> part_C(new R[groups.count * documents.slots * states]);
  const std::unique_ptr<R[]> part_A(new R[parts * channels * states]);
  const std::unique_ptr<R[]> part_D(new R[parts * channels]);
  const std::unique_ptr<R[]> part_bias(new R[parts * channels]);
  begin_output(out.u, channels, documents);
  begin_output(out.delta, channels, documents);
  begin_output(out.z, channels, documents);

  struct Scratch {
    std::vector<R> B, C;       // of a chunk: (kChunk, N)
    std::vector<V> carry, dA;  // (blocks of a group, N)
    std::vector<V> dB, dC;     // of a chunk: (kChunk, N), lanes not yet summed
  };
  const size_t tile = kChunk * states;
  const size_t group_states = groups.per_group / lanes * states;
  const Scratch empty{std::vector<R>(tile),         std::vector<R>(tile),
                      std::vector<V>(group_states), std::vector<V>(group_states),
                      std::vector<V>(tile + lanes), std::vector<V>(tile + lanes)};
  for_each_item(parts * groups.count, empty, [&](Scratch& scratch, int64_t item) {
    const int64_t part = order[item / groups.count];
    const Segment& segment = segments[part];
    const int64_t group = item % groups.count;
    const int64_t first_block = groups.blocks_before(group);
    const int blocks = groups.blocks(group);
    Tokens<R> tokens = {};
    BackwardTokens<R> io;
    std::vector<V> dD(blocks);
    std::vector<V> dbias(blocks);
    std::fill(scratch.dA.begin(), scratch.dA.end(), V{});
    for (int64_t document = segment.last - 1; document >= segment.first; --document) {
      const int64_t start = documents.starts[document];
      const int64_t end = documents.ends[document];
      const int64_t row_start = start - start % in.u.length;
      for (int number = 0; number < blocks; ++number) {
        V* carry = &scratch.carry[number * states];
        const int64_t channel = (first_block + number) * lanes;
        if (dfinal) {
          load_block(dfinal + (document * channels + channel) * states, states,
                     groups.lanes_of(first_block + number), carry);
        } else {
          std::fill(carry, carry + states, V{});
        }
      }
      for (int64_t chunk = (end - start - 1) / kChunk; chunk >= 0; --chunk) {
        const int64_t slot = start + chunk * kChunk;
        const int count = int(std::min<int64_t>(kChunk, end - slot));
        widen(in.B, slot, count, states, scratch.B.data());
        widen(in.C, slot, count, states, scratch.C.data());
        std::fill(scratch.dB.begin(), scratch.dB.begin() + count * states, V{});
        std::fill(scratch.dC.begin(), scratch.dC.begin() + count * states, V{});
        for (int number = 0; number < blocks; ++number) {
          const int64_t block = first_block + number;
          const int64_t channel = block * lanes;
          const int width = groups.lanes_of(block);
          const int64_t ahead = std::min<int64_t>(kChunk, slot - row_start);
          const Ahead next(slot - ahead, ahead, first_block * lanes, blocks * lanes, number,
                           blocks);
          for (const auto& rows : {in.u, in.delta, in.z, dy})
            next.prefetch(rows);
          load_tokens(in, slot, count, channel, width, tokens);
          const V skip = in.D ? load(in.D + channel, width) : V{};
          V dz_factor[kChunk], gates[kChunk];
          if (in.z) sigmoids(count, tokens.z, gates);
          const T* dy_rows = dy.at(slot) + channel;
          for (int token = 0; token < count; ++token) {
            V g = load(dy_rows + token * dy.token, width);
            if (in.z) {
              const V z = tokens.z[token];
              const V gate = gates[token];
              dz_factor[token] = g * gate * (R(1) + z * (R(1) - gate));
              g *= z * gate;
            }
            io.g[token] = g;
            io.y[token] = in.D ? skip * tokens.u[token] : V{};
            io.sum_B[token] = io.sum_A[token] = V{};
          }
          const R* state =
              saved + saved_chunk(document, start, chunk) * saved_size + channel * states;
          for_each_tile<8>(states, [&](int64_t n, auto tile) {
            V from[tile.value];
            std::memcpy(from, state + n * lanes, sizeof from);
            backward_tile<tile.value, R>(
                count, tokens, io, from, &scratch.carry[number * states + n],
                &A[block * states + n], &scratch.dA[number * states + n], scratch.B.data() + n,
                scratch.C.data() + n, scratch.dB.data() + n, scratch.dC.data() + n, states,
                bool(in.z));
          });
          if (in.softplus) sigmoids(count, tokens.raw, gates);
          for (int token = 0; token < count; ++token) {
            const int64_t place = (slot + token) * channels + channel;
            V du = tokens.dt[token] * io.sum_B[token];
            V ddelta = io.sum_A[token] + tokens.u[token] * io.sum_B[token];
            if (in.D) {
              du += io.g[token] * skip;
              dD[number] += io.g[token] * tokens.u[token];
            }
            if (in.softplus) ddelta *= gates[token];
            dbias[number] += ddelta;
            store(out.u + place, du, width);
            store(out.delta + place, ddelta, width);
            if (in.z) store(out.z + place, dz_factor[token] * io.y[token], width);
          }
        }
        const int64_t place = (group * documents.slots + slot) * states;
        const int64_t sums = count * states;
        for (int64_t i = 0; i < sums; i += lanes) {
          const int num_sums = int(std::min<int64_t>(lanes, sums - i));
          store(&part_B[place + i], sum_lanes<R>(&scratch.dB[i]), num_sums);
          store(&part_C[place + i], sum_lanes<R>(&scratch.dC[i]), num_sums);
        }
      }
      if (out.initial_state) {
        for (int number = 0; number < blocks; ++number) {
          const int64_t channel = (first_block + number) * lanes;
          store_block(out.initial_state + (document * channels + channel) * states, states,
                      groups.lanes_of(first_block + number), &scratch.carry[number * states]);
        }
      }
    }
    for (int number = 0; number < blocks; ++number) {
      const int64_t channel = (first_block + number) * lanes;
      const int width = groups.lanes_of(first_block + number);
      store_block(&part_A[(part * channels + channel) * states], states, width,
                  &scratch.dA[number * states]);
      store(&part_D[part * channels + channel], dD[number], width);
      store(&part_bias[part * channels + channel], dbias[number], width);
    }
  });
  sum_parts(part_A.get(), parts, channels * states, channels * states, out.A);
  sum_parts(part_D.get(), parts, channels, channels, out.D);
  sum_parts(part_bias.get(), parts, channels, channels, out.delta_bias);
  sum_groups<T>(part_B.get(), groups.count, states, documents, out.B);
  sum_groups<T>(part_C.get(), groups.count, states, documents, out.C);
}

}  // namespace packmamba

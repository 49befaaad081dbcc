// The selective scan, backward: chunks of a document from its last to its first, each replayed from its saved state, then walked
// back. With g the gradient before the gate and w = delta u:
//   dh = g C + carry;  dC += g h;  dB += dh w;  carry = dh a;  ddelta = sum_n carry h_prev A + u sum_n dh B;
//   du = delta sum_n dh B + g D;  dA += carry h_prev delta.
// dB and dC are summed over the blocks of a work item lane by lane, then over lanes, then over groups; dA, dD and dbias over
// the documents of a segment, then over segments. Every order is fixed by the layout.
#pragma once
#include "ssm.h"

namespace packmamba {

template <class R> struct BackwardTokens {
  Vec<R> g[kChunk], y[kChunk], sum_B[kChunk], sum_A[kChunk];
};

// `count` states of one block: replays the chunk's tokens from `state`, then walks back.
template <int count, class R>
void backward_tile(int tokens, const Tokens<R>& in, BackwardTokens<R>& io, const Vec<R>* state, Vec<R>* carry, const Vec<R>* A,
                   Vec<R>* dA, const R* B, const R* C, Vec<R>* dB, Vec<R>* dC, int64_t states, bool needs_y) {
  using V = Vec<R>;
  V h[kChunk + 1][count], decay[kChunk][count];
  {
    constexpr int n = std::min(count, kTogether);
    V f[count], k[count];
    std::copy(state, state + count, h[0]);
    for (int t = 0; t < tokens; ++t) {
      const V step = in.size[t] * R(1.4426950408889634), w = in.drive[t];
#pragma GCC unroll 1
      for (int i = 0; i < count; i += n) {
        V power[n];
        SIDE_BY_SIDE power[j] = step * A[i + j];
        split_exp2<n>(power, f + i, k + i);
      }
#pragma GCC unroll 1
      for (int i = 0; i < count; i += n) {
        V a[n];
        join_exp2<n>(f + i, k + i, a);
        SIDE_BY_SIDE a[j] = f[i + j] == f[i + j] ? a[j] : f[i + j];
        SIDE_BY_SIDE decay[t][i + j] = a[j];
        SIDE_BY_SIDE h[t + 1][i + j] = a[j] * h[t][i + j] + w * B[t * states + i + j];
      }
    }
  }
  if (needs_y)
    for (int t = 0; t < tokens; ++t) {
      V sum = io.y[t];
#pragma GCC unroll 16
      for (int n = 0; n < count; ++n) sum += h[t + 1][n] * C[t * states + n];
      io.y[t] = sum;
    }
  V back[count], total[count];
#pragma GCC unroll 16
  for (int n = 0; n < count; ++n) back[n] = carry[n], total[n] = dA[n];
  for (int t = tokens - 1; t >= 0; --t) {
    const V g = io.g[t], w = in.drive[t], step = in.size[t];
    V sum_B = io.sum_B[t], sum_A = io.sum_A[t];
#pragma GCC unroll 16
    for (int n = 0; n < count; ++n) {
      const int64_t i = t * states + n;
      dC[i] += g * h[t + 1][n];
      const V dh = g * C[i] + back[n];
      dB[i] += dh * w;
      sum_B += dh * B[i];
      back[n] = dh * decay[t][n];
      const V through = back[n] * h[t][n];
      sum_A += through * A[n];
      total[n] += through * step;
    }
    io.sum_B[t] = sum_B, io.sum_A[t] = sum_A;
  }
#pragma GCC unroll 16
  for (int n = 0; n < count; ++n) carry[n] = back[n], dA[n] = total[n];
}

template <class T>
void scan_backward(const ScanArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal, const accumulate_t<T>* saved,
                   const ScanGradients<T>& out) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  constexpr int lanes = kLanes<R>;
  const Documents& documents = in.documents;
  const int64_t states = in.states, channels = in.channels;
  const int64_t padded = (channels + kPaddedChannels - 1) / kPaddedChannels * kPaddedChannels, saved_size = padded * states;
  const ChannelGroups<R> groups(channels);
  const auto segments = join_documents(documents, kSegmentTokens);
  const auto order = longest_first(segments);
  const auto A = blocks_of_A(in.A, channels, states, R(1));
  const int64_t parts = int64_t(segments.size());
  // Not initialised: every real token and every channel of a segment is written once.
  const std::unique_ptr<R[]> part_B(new R[groups.count * documents.slots * states]);
  const std::unique_ptr<R[]> part_C(new R[groups.count * documents.slots * states]);
  const std::unique_ptr<R[]> part_A(new R[parts * channels * states]), part_D(new R[parts * channels]);
  const std::unique_ptr<R[]> part_bias(new R[parts * channels]);
  begin_output(out.u, channels, documents);
  begin_output(out.delta, channels, documents);
  begin_output(out.z, channels, documents);

  struct Scratch {
    std::vector<R> B, C;
    std::vector<V> carry, dA, dB, dC;
  };
  const size_t tile = kChunk * states, group_states = groups.per_group / lanes * states;
  const Scratch prototype{std::vector<R>(tile), std::vector<R>(tile),  std::vector<V>(group_states),
                          std::vector<V>(group_states), std::vector<V>(tile + lanes), std::vector<V>(tile + lanes)};
  for_each_item(parts * groups.count, prototype, [&](Scratch& scratch, int64_t item) {
    const int64_t part = order[item / groups.count];
    const Segment& segment = segments[part];
    const int64_t group = item % groups.count, first_block = groups.blocks_before(group);
    const int blocks = groups.blocks(group);
    Tokens<R> tokens = {};
    BackwardTokens<R> io;
    std::vector<V> dD(blocks), dbias(blocks);
    std::fill(scratch.dA.begin(), scratch.dA.end(), V{});
    for (int64_t s = segment.last - 1; s >= segment.first; --s) {
      const int64_t start = documents.starts[s], end = documents.ends[s], row_start = start - start % in.u.length;
      for (int j = 0; j < blocks; ++j) {
        V* carry = &scratch.carry[j * states];
        const int64_t channel = (first_block + j) * lanes;
        if (dfinal)
          load_block(dfinal + (s * channels + channel) * states, states, groups.lanes_of(first_block + j), carry);
        else
          std::fill(carry, carry + states, V{});
      }
      for (int64_t chunk = (end - start - 1) / kChunk; chunk >= 0; --chunk) {
        const int64_t slot = start + chunk * kChunk;
        const int count = int(std::min<int64_t>(kChunk, end - slot));
        widen(in.B, slot, count, states, scratch.B.data());
        widen(in.C, slot, count, states, scratch.C.data());
        std::fill(scratch.dB.begin(), scratch.dB.begin() + count * states, V{});
        std::fill(scratch.dC.begin(), scratch.dC.begin() + count * states, V{});
        for (int j = 0; j < blocks; ++j) {
          const int64_t block = first_block + j, channel = block * lanes;
          const int width = groups.lanes_of(block);
          const int64_t ahead = std::min<int64_t>(kChunk, slot - row_start);
          const Ahead next(slot - ahead, ahead, first_block * lanes, blocks * lanes, j, blocks);
          for (const auto& rows : {in.u, in.delta, in.z, dy}) next.prefetch(rows);
          load_tokens(in, slot, count, channel, width, tokens);
          const V skip = in.D ? load(in.D + channel, width) : V{};
          V dz_factor[kChunk], gates[kChunk];
          if (in.z) sigmoids(count, tokens.z, gates);
          const T* dy_rows = dy.at(slot) + channel;
          for (int t = 0; t < count; ++t) {
            V g = load(dy_rows + t * dy.token, width);
            if (in.z) {
              const V z = tokens.z[t], gate = gates[t];
              dz_factor[t] = g * gate * (R(1) + z * (R(1) - gate));
              g *= z * gate;
            }
            io.g[t] = g;
            io.y[t] = in.D ? skip * tokens.u[t] : V{};
            io.sum_B[t] = io.sum_A[t] = V{};
          }
          const R* state = saved + saved_chunk(s, start, chunk) * saved_size + channel * states;
          for_each_tile<8>(states, [&](int64_t n, auto tile) {
            V from[tile.value];
            std::memcpy(from, state + n * lanes, sizeof from);
            backward_tile<tile.value, R>(count, tokens, io, from, &scratch.carry[j * states + n], &A[block * states + n],
                                         &scratch.dA[j * states + n], scratch.B.data() + n, scratch.C.data() + n,
                                         scratch.dB.data() + n, scratch.dC.data() + n, states, bool(in.z));
          });
          if (in.softplus) sigmoids(count, tokens.raw, gates);
          for (int t = 0; t < count; ++t) {
            const int64_t place = (slot + t) * channels + channel;
            V du = tokens.size[t] * io.sum_B[t], ddelta = io.sum_A[t] + tokens.u[t] * io.sum_B[t];
            if (in.D) {
              du += io.g[t] * skip;
              dD[j] += io.g[t] * tokens.u[t];
            }
            if (in.softplus) ddelta *= gates[t];
            dbias[j] += ddelta;
            store(out.u + place, du, width);
            store(out.delta + place, ddelta, width);
            if (in.z) store(out.z + place, dz_factor[t] * io.y[t], width);
          }
        }
        const int64_t place = (group * documents.slots + slot) * states, sums = count * states;
        for (int64_t i = 0; i < sums; i += lanes) {
          const int some = int(std::min<int64_t>(lanes, sums - i));
          store(&part_B[place + i], sum_lanes<R>(&scratch.dB[i]), some);
          store(&part_C[place + i], sum_lanes<R>(&scratch.dC[i]), some);
        }
      }
      if (out.initial_state)
        for (int j = 0; j < blocks; ++j) {
          const int64_t channel = (first_block + j) * lanes;
          store_block(out.initial_state + (s * channels + channel) * states, states, groups.lanes_of(first_block + j),
                      &scratch.carry[j * states]);
        }
    }
    for (int j = 0; j < blocks; ++j) {
      const int64_t channel = (first_block + j) * lanes;
      const int width = groups.lanes_of(first_block + j);
      store_block(&part_A[(part * channels + channel) * states], states, width, &scratch.dA[j * states]);
      store(&part_D[part * channels + channel], dD[j], width);
      store(&part_bias[part * channels + channel], dbias[j], width);
    }
  });
  sum_parts(part_A.get(), parts, channels * states, channels * states, out.A);
  sum_parts(part_D.get(), parts, channels, channels, out.D);
  sum_parts(part_bias.get(), parts, channels, channels, out.delta_bias);
  sum_groups<T>(part_B.get(), groups.count, states, documents, out.B);
  sum_groups<T>(part_C.get(), groups.count, states, documents, out.C);
}

}  // namespace packmamba

// The selective scan, forward: see ssm.h for the mapping.
#pragma once
#include "ssm.h"

namespace packmamba {

// Steps `count` states of one block through a chunk's tokens and adds what they contribute to y.
template <int count, class R>
void forward_tile(int tokens, const Vec<R>* size, const Vec<R>* drive, Vec<R>* y, Vec<R>* state, const Vec<R>* A, const R* B,
                  const R* C, int64_t states) {
  using V = Vec<R>;
  constexpr int n = std::min(count, kTogether);
  V f[count], k[count];
  for (int t = 0; t < tokens; ++t, B += states, C += states) {
    const V step = size[t], w = drive[t];
#pragma GCC unroll 1
    for (int i = 0; i < count; i += n) {
      V power[n];
      SIDE_BY_SIDE power[j] = step * A[i + j];
      split_exp2<n>(power, f + i, k + i);
    }
    V sum = y[t];
#pragma GCC unroll 1
    for (int i = 0; i < count; i += n) {
      V h[n];
      join_exp2<n>(f + i, k + i, h);
      SIDE_BY_SIDE h[j] = (f[i + j] == f[i + j] ? h[j] : f[i + j]) * state[i + j] + w * B[i + j];
      SIDE_BY_SIDE state[i + j] = h[j];
      SIDE_BY_SIDE sum += h[j] * C[i + j];
    }
    y[t] = sum;
  }
}

template <class T>
void scan_forward(const ScanArguments<T>& in, T* y, accumulate_t<T>* final_state, accumulate_t<T>* saved,
                  int64_t saved_places) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  constexpr int lanes = kLanes<R>;
  const Documents& documents = in.documents;
  const int64_t states = in.states, channels = in.channels;
  const int64_t saved_size = (channels + kPaddedChannels - 1) / kPaddedChannels * kPaddedChannels * states;
  const ChannelGroups<R> groups(channels);
  const auto segments = join_documents(documents, kSegmentTokens);
  const auto order = longest_first(segments);
  const auto A = blocks_of_A(in.A, channels, states, R(1.4426950408889634));
  begin_output(y, channels, documents);
  if (saved)
    for (int64_t s = 0, from = 0; s <= documents.count; ++s) {
      const bool last = s == documents.count;
      const int64_t to = last ? saved_places : saved_chunk(s, documents.starts[s], 0);
      std::fill(saved + from * saved_size, saved + to * saved_size, R(0));
      if (!last) from = to + (documents.ends[s] - documents.starts[s] + kChunk - 1) / kChunk;
    }

  struct Scratch {
    std::vector<R> B, C;
    std::vector<V> state;
  };
  const Scratch prototype{std::vector<R>(kChunk * states), std::vector<R>(kChunk * states),
                          std::vector<V>(groups.per_group / lanes * states)};
  for_each_item(int64_t(segments.size()) * groups.count, prototype, [&](Scratch& scratch, int64_t item) {
    const Segment& segment = segments[order[item / groups.count]];
    const int64_t group = item % groups.count, first_block = groups.blocks_before(group);
    const int blocks = groups.blocks(group);
    Tokens<R> tokens = {};
    V out[kChunk], gate[kChunk];
    for (int64_t s = segment.first; s < segment.last; ++s) {
      const int64_t start = documents.starts[s], end = documents.ends[s];
      const int64_t row_end = (start / in.u.length + 1) * in.u.length;
      for (int j = 0; j < blocks; ++j) {
        V* state = &scratch.state[j * states];
        const int64_t channel = (first_block + j) * lanes;
        if (in.initial_state)
          load_block(in.initial_state + (s * channels + channel) * states, states, groups.lanes_of(first_block + j), state);
        else
          std::fill(state, state + states, V{});
      }
      for (int64_t slot = start; slot < end; slot += kChunk) {
        const int count = int(std::min<int64_t>(kChunk, end - slot));
        const int ahead = int(std::min<int64_t>(kChunk, row_end - slot - count));
        widen(in.B, slot, count, states, scratch.B.data());
        widen(in.C, slot, count, states, scratch.C.data());
        for (int j = 0; j < blocks; ++j) {
          const int64_t block = first_block + j, channel = block * lanes;
          const int width = groups.lanes_of(block);
          V* state = &scratch.state[j * states];
          if (saved) {
            R* place = saved + saved_chunk(s, start, (slot - start) / kChunk) * saved_size + channel * states;
            std::memcpy(place, state, sizeof(V) * states);
            // Nothing that leaves is undefined: neither channels past the last, nor (below) places that no chunk has.
            if (channel + lanes >= channels)
              std::fill(place + lanes * states, place + (saved_size - channel * states), R(0));
          }
          const Ahead next(slot + count, ahead, first_block * lanes, blocks * lanes, j, blocks);
          for (const auto& rows : {in.u, in.delta, in.z}) next.prefetch(rows);
          load_tokens(in, slot, count, channel, width, tokens);
          const V skip = in.D ? load(in.D + channel, width) : V{};
          for (int t = 0; t < count; ++t) out[t] = in.D ? skip * tokens.u[t] : V{};
          for_each_tile<16>(states, [&](int64_t n, auto tile) {
            forward_tile<tile.value, R>(count, tokens.size, tokens.drive, out, state + n, &A[block * states + n],
                                        scratch.B.data() + n, scratch.C.data() + n, states);
          });
          if (in.z) {
            sigmoids(count, tokens.z, gate);
            for (int t = 0; t < count; ++t) out[t] *= tokens.z[t] * gate[t];
          }
          for (int t = 0; t < count; ++t) store(y + (slot + t) * channels + channel, out[t], width);
        }
      }
      if (final_state)
        for (int j = 0; j < blocks; ++j) {
          const int64_t channel = (first_block + j) * lanes;
          store_block(final_state + (s * channels + channel) * states, states, groups.lanes_of(first_block + j),
                      &scratch.state[j * states]);
        }
    }
  });
}

}  // namespace packmamba

// The selective scan, forward; ssm.h has the equation and who holds what.
//
//   work item    a segment of documents x a group of channels
//     document     states of all the group's blocks chosen: the initial state, or zero
//       chunk        B and C of its tokens widened once
//         block        its state saved; u, dt, dt u, z of its tokens in vectors; rows of the next
//                      chunk prefetched
//           tile         up to 16 states: along the chunk's tokens, h in registers
//
// Bound and bytes: ssm.h.
#pragma once
#include "ssm.h"

namespace packmamba {

// Steps `count` states of one block through a chunk's tokens and adds what they contribute to y.
// A is times log2(e); B and C are a token's `states` numbers, from the tile's first on.
template <int count, class R>
void forward_tile(int tokens, const Vec<R>* dt, const Vec<R>* drive, Vec<R>* y, Vec<R>* state,
                  const Vec<R>* A, const R* B, const R* C, int64_t states) {
  using V = Vec<R>;
  constexpr int n = std::min(count, kTogether);
  V fraction[count], exponent[count];
  for (int token = 0; token < tokens; ++token, B += states, C += states) {
    const V dt_t = dt[token];
    const V drive_t = drive[token];
#pragma GCC unroll 1
    for (int i = 0; i < count; i += n) {
      V power[n];
      SIDE_BY_SIDE power[j] = dt_t * A[i + j];
      split_exp2<n>(power, fraction + i, exponent + i);
    }
    V sum = y[token];
#pragma GCC unroll 1
    for (int i = 0; i < count; i += n) {
      V h[n];
      join_exp2<n>(fraction + i, exponent + i, h);
      SIDE_BY_SIDE h[j] =
          (fraction[i + j] == fraction[i + j] ? h[j] : fraction[i + j]) * state[i + j] +
          drive_t * B[i + j];
      SIDE_BY_SIDE state[i + j] = h[j];
      SIDE_BY_SIDE sum += h[j] * C[i + j];
    }
    y[token] = sum;
  }
}

template <class T>
void scan_forward(const ScanArguments<T>& in, T* y, accumulate_t<T>* final_state,
                  accumulate_t<T>* saved, int64_t saved_places) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  constexpr int lanes = kLanes<R>;
  const Documents& documents = in.documents;
  const int64_t states = in.states;
  const int64_t channels = in.channels;
  const int64_t saved_size =
      (channels + kPaddedChannels - 1) / kPaddedChannels * kPaddedChannels * states;
  const ChannelGroups<R> groups(channels);
  const auto segments = join_documents(documents, kSegmentTokens);
  const auto order = longest_first(segments);
  const auto A = blocks_of_A(in.A, channels, states, R(1.4426950408889634));
  begin_output(y, channels, documents);
  if (saved) {
    for (int64_t document = 0, from = 0; document <= documents.count; ++document) {
      const bool last = document == documents.count;
      const int64_t to = last ? saved_places : saved_chunk(document, documents.starts[document], 0);
      std::fill(saved + from * saved_size, saved + to * saved_size, R(0));
      if (!last)
        from = to + (documents.ends[document] - documents.starts[document] + kChunk - 1) / kChunk;
    }
  }

  struct Scratch {
    std::vector<R> B, C;   // of a chunk: (kChunk, N)
    std::vector<V> state;  // (blocks of a group, N)
  };
  const Scratch empty{std::vector<R>(kChunk * states), std::vector<R>(kChunk * states),
                      std::vector<V>(groups.per_group / lanes * states)};
  for_each_item(
      int64_t(segments.size()) * groups.count, empty, [&](Scratch& scratch, int64_t item) {
        const Segment& segment = segments[order[item / groups.count]];
        const int64_t group = item % groups.count;
        const int64_t first_block = groups.blocks_before(group);
        const int blocks = groups.blocks(group);
        Tokens<R> tokens = {};
        V out[kChunk], gate[kChunk];
        for (int64_t document = segment.first; document < segment.last; ++document) {
          const int64_t start = documents.starts[document];
          const int64_t end = documents.ends[document];
          const int64_t row_end = (start / in.u.length + 1) * in.u.length;
          for (int number = 0; number < blocks; ++number) {
            V* state = &scratch.state[number * states];
            const int64_t channel = (first_block + number) * lanes;
            if (in.initial_state) {
              load_block(in.initial_state + (document * channels + channel) * states, states,
                         groups.lanes_of(first_block + number), state);
            } else {
              std::fill(state, state + states, V{});
            }
          }
          for (int64_t slot = start; slot < end; slot += kChunk) {
            const int count = int(std::min<int64_t>(kChunk, end - slot));
            const int ahead = int(std::min<int64_t>(kChunk, row_end - slot - count));
            widen(in.B, slot, count, states, scratch.B.data());
            widen(in.C, slot, count, states, scratch.C.data());
            for (int number = 0; number < blocks; ++number) {
              const int64_t block = first_block + number;
              const int64_t channel = block * lanes;
              const int width = groups.lanes_of(block);
              V* state = &scratch.state[number * states];
              if (saved) {
                R* place = saved +
                           saved_chunk(document, start, (slot - start) / kChunk) * saved_size +
                           channel * states;
                std::memcpy(place, state, sizeof(V) * states);
                // Nothing that leaves is undefined: neither channels past the last, nor (below)
                // places that no chunk has.
                if (channel + lanes >= channels)
                  std::fill(place + lanes * states, place + (saved_size - channel * states), R(0));
              }
              const Ahead next(slot + count, ahead, first_block * lanes, blocks * lanes, number,
                               blocks);
              for (const auto& rows : {in.u, in.delta, in.z})
                next.prefetch(rows);
              load_tokens(in, slot, count, channel, width, tokens);
              const V skip = in.D ? load(in.D + channel, width) : V{};
              for (int token = 0; token < count; ++token)
                out[token] = in.D ? skip * tokens.u[token] : V{};
              for_each_tile<16>(states, [&](int64_t first_state, auto tile) {
                forward_tile<tile.value, R>(count, tokens.dt, tokens.drive, out,
                                            state + first_state, &A[block * states + first_state],
                                            scratch.B.data() + first_state,
                                            scratch.C.data() + first_state, states);
              });
              if (in.z) {
                sigmoids(count, tokens.z, gate);
                for (int token = 0; token < count; ++token)
                  out[token] *= tokens.z[token] * gate[token];
              }
              for (int token = 0; token < count; ++token)
                store(y + (slot + token) * channels + channel, out[token], width);
            }
          }
          if (final_state) {
            for (int number = 0; number < blocks; ++number) {
              const int64_t channel = (first_block + number) * lanes;
              store_block(final_state + (document * channels + channel) * states, states,
                          groups.lanes_of(first_block + number), &scratch.state[number * states]);
            }
          }
        }
      });
}

}  // namespace packmamba

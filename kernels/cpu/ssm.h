// The selective scan over packed documents: what its forward and its backward share.
//
// Mapping: a work item is a run of whole documents times a group of channels. Lanes are neighbouring channels of one block; a
// tile of states is kept in registers along the tokens of a chunk; B_t[n] and C_t[n] are the same for all lanes. Nothing is
// exchanged along time, and a document starts by choosing its state, so what came before it is never read.
// Bound: multiply-adds. An element (token, channel, state) takes one exponential and 4 multiply-adds forward, one and 12 backward.
// Bytes: forward reads u, delta, z, B, C and writes y, and a state every kChunk tokens for the backward.
#pragma once
#include "tensors.h"

namespace packmamba {

constexpr int kChunk = 32;            // tokens between saved states; the backward replays them. Python allocates accordingly
constexpr int kGroupChannels = 128;    // of a work item, more where there would be too many groups
constexpr int kMaxGroups = 32;        // bounds the partial sums of dB and dC
constexpr int kSegmentTokens = 256;   // joins short documents; bounds the partial sums of dA
constexpr int kPaddedChannels = 16;   // saved states are padded to this many channels
constexpr int kTogether = 4;          // tokens, or states, whose exponentials are computed side by side; divides kChunk

template <class T> struct ScanArguments {
  using R = accumulate_t<T>;
  Rows<const T> u, delta, B, C, z;
  const R *A, *D, *delta_bias, *initial_state;
  bool softplus;
  Documents documents;
  int64_t channels, states;

  ScanArguments(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C, const OptionalTensor& D,
                const OptionalTensor& z, const OptionalTensor& delta_bias, bool softplus, const Tensor& starts, const Tensor& ends,
                const OptionalTensor& initial_state)
      : u(u), delta(delta), B(B), C(C), z(z), A(pointer<const R>(A)), D(pointer<const R>(D)),
        delta_bias(pointer<const R>(delta_bias)), initial_state(pointer<const R>(initial_state)), softplus(softplus),
        documents(starts, ends, u), channels(A.size(0)), states(A.size(1)) {}
};

// How channels are cut into groups of blocks; a block is one vector of channels.
template <class R> struct ChannelGroups {
  static constexpr int lanes = kLanes<R>;
  int64_t channels, per_group, count;

  explicit ChannelGroups(int64_t channels) : channels(channels) {
    const int64_t wide = (channels + kMaxGroups - 1) / kMaxGroups;
    per_group = (wide + kGroupChannels - 1) / kGroupChannels * kGroupChannels;
    count = (channels + per_group - 1) / per_group;
  }
  int64_t blocks_before(int64_t group) const { return group * (per_group / lanes); }
  int blocks(int64_t group) const {
    return int((std::min(channels, (group + 1) * per_group) - group * per_group + lanes - 1) / lanes);
  }
  int lanes_of(int64_t block) const { return int(std::min<int64_t>(lanes, channels - block * lanes)); }
};

// Where the states saved of a document's chunk lie: one place more than chunks per document is always enough.
inline int64_t saved_chunk(int64_t document, int64_t start, int64_t chunk) { return document + start / kChunk + chunk; }

// (channels, states) of a block with its channels on lanes: states vectors. Lanes past the last channel are zero.
template <class R> void load_block(const R* from, int64_t states, int count, Vec<R>* to, R factor = 1) {
  for (int64_t n = 0; n < states; ++n) {
    R lanes[kLanes<R>] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i * states + n] * factor;
    to[n] = bit_load<Vec<R>>(lanes);
  }
}
template <class R> void store_block(R* to, int64_t states, int count, const Vec<R>* from) {
  for (int64_t n = 0; n < states; ++n) {
    R lanes[kLanes<R>];
    std::memcpy(lanes, &from[n], sizeof lanes);
    for (int i = 0; i < count; ++i) to[i * states + n] = lanes[i];
  }
}

// A as the kernels read it: [block][state] vectors, times `factor`.
template <class R> std::vector<Vec<R>> blocks_of_A(const R* A, int64_t channels, int64_t states, R factor) {
  constexpr int lanes = kLanes<R>;
  std::vector<Vec<R>> blocks((channels + lanes - 1) / lanes * states);
  for (int64_t c = 0; c < channels; c += lanes)
    load_block(A + c * states, states, int(std::min<int64_t>(lanes, channels - c)), &blocks[c / lanes * states], factor);
  return blocks;
}

// B or C of a chunk's tokens as contiguous accumulation-type numbers.
template <class T> void widen(const Rows<const T>& from, int64_t slot, int tokens, int64_t states, accumulate_t<T>* to) {
  for (int t = 0; t < tokens; ++t) {
    const T* row = from.at(slot + t);
    for (int64_t n = 0; n < states; ++n) to[t * states + n] = to_float(row[n]);
  }
}

// What a block's tokens of one chunk are before states come in.
template <class R> struct Tokens {
  Vec<R> u[kChunk], raw[kChunk], size[kChunk], drive[kChunk], z[kChunk];
};

template <class T>
void load_tokens(const ScanArguments<T>& in, int64_t slot, int tokens, int64_t channel, int count, Tokens<accumulate_t<T>>& to) {
  using R = accumulate_t<T>;
  const Vec<R> bias = in.delta_bias ? load(in.delta_bias + channel, count) : Vec<R>{};
  const T *u = in.u.at(slot) + channel, *delta = in.delta.at(slot) + channel;
  for (int t = 0; t < tokens; ++t) {
    to.u[t] = load(u + t * in.u.token, count);
    to.raw[t] = load(delta + t * in.delta.token, count) + bias;
    to.size[t] = to.raw[t];
  }
  if (in.softplus)
    for (int t = 0; t < tokens; t += kTogether) softplus_lanes<kTogether>(&to.raw[t], &to.size[t]);
  for (int t = 0; t < tokens; ++t) to.drive[t] = to.size[t] * to.u[t];
  if (!in.z) return;
  const T* z = in.z.at(slot) + channel;
  for (int t = 0; t < tokens; ++t) to.z[t] = load(z + t * in.z.token, count);
}

// Gates of a chunk's tokens, or of a few more.
template <class V> void sigmoids(int tokens, const V* from, V* to) {
  for (int t = 0; t < tokens; t += kTogether) sigmoid_lanes<kTogether>(from + t, to + t);
}

// Calls tile(first state, constant of states) for 16, 8, 4 or 1 states at a time.
template <int widest, class Body> void for_each_tile(int64_t states, const Body& body) {
  int64_t n = 0;
  if constexpr (widest >= 16)
    for (; n + 16 <= states; n += 16) body(n, std::integral_constant<int, 16>{});
  for (; n + 8 <= states; n += 8) body(n, std::integral_constant<int, 8>{});
  for (; n + 4 <= states; n += 4) body(n, std::integral_constant<int, 4>{});
  for (; n < states; ++n) body(n, std::integral_constant<int, 1>{});
}

template <class T> struct ScanGradients {
  using R = accumulate_t<T>;
  T *u, *delta, *B, *C, *z;
  R *A, *D, *delta_bias, *initial_state;
};

}  // namespace packmamba

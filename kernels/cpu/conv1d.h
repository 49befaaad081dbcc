// The depthwise causal convolution over packed documents, forward and backward.
//
// Mapping: a work item is a run of pieces of documents times a group of channels; lanes are neighbouring channels. A block of
// tokens is walked for one vector of channels at a time, with taps, window and sums in registers, and the block's rows in L1.
// The backward walks from a piece's last token to its first, and begins with the W - 1 tokens after it.
// Bound: memory. Bytes: forward reads x and writes y; backward reads x and dy and writes dx.
#pragma once
#include "tensors.h"

namespace packmamba {

constexpr int kConvTokens = 8;          // of a block
constexpr int kConvGroup = 512;         // channels of a work item
constexpr int64_t kPieceTokens = 256;   // cuts long documents and joins short ones; bounds the partial sums of dweight

template <class T> struct ConvArguments {
  using R = accumulate_t<T>;
  Rows<const T> x;
  const R *weight, *bias, *initial_state;
  bool silu;
  Documents documents;
  int64_t channels;
  int taps;

  ConvArguments(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& starts, const Tensor& ends,
                const OptionalTensor& initial_state, bool silu)
      : x(x), weight(pointer<const R>(weight)), bias(pointer<const R>(bias)), initial_state(pointer<const R>(initial_state)),
        silu(silu), documents(starts, ends, x), channels(weight.size(0)), taps(int(weight.size(1))) {}
};

// Tokens [first, last) of a document.
struct Piece {
  int64_t document, first, last;
};

// Pieces, and where each work item's run of them begins (one more entry than items).
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> bounds;

  explicit Pieces(const Documents& documents) {
    int64_t tokens = kPieceTokens;
    for (int64_t s = 0; s < documents.count; ++s)
      for (int64_t t = documents.starts[s]; t < documents.ends[s]; t += kPieceTokens) {
        if (tokens >= kPieceTokens) bounds.push_back(int64_t(all.size())), tokens = 0;
        all.push_back({s, t, std::min<int64_t>(documents.ends[s], t + kPieceTokens)});
        tokens += all.back().last - t;
      }
    bounds.push_back(int64_t(all.size()));
  }
  int64_t items() const { return int64_t(bounds.size()) - 1; }
};

// One vector of channels of one document: its inputs, of which those before the document are its initial state.
template <class T, int W> struct ConvBlock {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const T* x;  // of the document's first token
  const R* before;
  int64_t token, start, end;
  int count;
  V taps[W], bias;

  ConvBlock(const ConvArguments<T>& in, const V* parameters, int64_t s, int64_t channel)
      : x(in.x.at(in.documents.starts[s]) + channel),
        before(in.initial_state ? in.initial_state + (s * in.channels + channel) * (W - 1) : nullptr), token(in.x.token),
        start(in.documents.starts[s]), end(in.documents.ends[s]),
        count(int(std::min<int64_t>(kLanes<R>, in.channels - channel))) {
    for (int k = 0; k < W; ++k) taps[k] = parameters[k];
    bias = parameters[W];
  }
  static V gather(const R* from, int64_t place, int count) {
    R lanes[kLanes<R>] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i * (W - 1) + place];
    return bit_load<V>(lanes);
  }
  V input(int64_t slot) const {
    if (slot >= start) return load(x + (slot - start) * token, count);
    return before ? gather(before, W - 1 + slot - start, count) : V{};
  }
  V apply(const V* window) const {
    V sum = bias;
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) sum += taps[k] * window[k];
    return sum;
  }
};

// [block][W taps, then the bias] vectors.
template <class T, int W> std::vector<Vec<accumulate_t<T>>> conv_parameters(const ConvArguments<T>& in) {
  using R = accumulate_t<T>;
  std::vector<Vec<R>> parameters;
  for (int64_t c = 0; c < in.channels; c += kLanes<R>) {
    const int count = int(std::min<int64_t>(kLanes<R>, in.channels - c));
    for (int k = 0; k < W; ++k) {
      R lanes[kLanes<R>] = {};
      for (int i = 0; i < count; ++i) lanes[i] = in.weight[(c + i) * W + k];
      parameters.push_back(bit_load<Vec<R>>(lanes));
    }
    parameters.push_back(in.bias ? load(in.bias + c, count) : Vec<R>{});
  }
  return parameters;
}

template <class T, int W> void conv_forward(const ConvArguments<T>& in, T* y, accumulate_t<T>* final_state) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  zero_padding(y, channels, in.documents);
  for_each_item(pieces.items() * groups, Nothing{}, [&](Nothing&, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    for (int64_t p = pieces.bounds[run]; p < pieces.bounds[run + 1]; ++p) {
      const Piece& piece = pieces.all[p];
      for (int64_t first = piece.first; first < piece.last; first += kConvTokens) {
        const int64_t last = std::min<int64_t>(piece.last, first + kConvTokens);
        for (int64_t c = from; c < to; c += kLanes<R>) {
          const ConvBlock<T, W> block(in, &parameters[c / kLanes<R> * (W + 1)], piece.document, c);
          V window[W];
          for (int k = 0; k < W - 1; ++k) window[k + 1] = block.input(first - (W - 1) + k);
          for (int64_t t = first; t < last; ++t) {
#pragma GCC unroll 4
            for (int k = 0; k < W - 1; ++k) window[k] = window[k + 1];
            window[W - 1] = load(block.x + (t - block.start) * block.token, block.count);
            V out = block.apply(window);
            if (in.silu) out *= sigmoid_lanes(out);
            store(y + t * channels + c, out, block.count);
          }
        }
      }
      if (final_state == nullptr || piece.last != in.documents.ends[piece.document]) continue;
      for (int64_t c = from; c < to; c += kLanes<R>) {
        const ConvBlock<T, W> block(in, &parameters[c / kLanes<R> * (W + 1)], piece.document, c);
        for (int k = 0; k < W - 1; ++k) {
          const V value = block.input(block.end - (W - 1) + k);
          for (int i = 0; i < block.count; ++i)
            final_state[(piece.document * channels + c + i) * (W - 1) + k] = value[i];
        }
      }
    }
  });
}

template <class T> struct ConvGradients {
  using R = accumulate_t<T>;
  T* x;
  R *weight, *bias, *initial_state;
};

// Gradients of one vector of channels, walking back over tokens of one piece.
template <class T, int W> struct ConvBackward : ConvBlock<T, W> {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const T* dy;
  int64_t dy_token;
  const R* dfinal;
  bool silu;
  V next[W - 1];  // gradients of the sums at the W - 1 tokens after the current one, nearest first
  V sums[W + 1];  // of the taps, then the bias

  // Of the sum at `slot`; leaves the window that it read.
  V at(int64_t slot, V* window) const {
    V grad = load(dy + (slot - this->start) * dy_token, this->count);
    if (silu) {
      const V sum = this->apply(window), gate = sigmoid_lanes(sum);
      grad *= gate * (R(1) + sum * (R(1) - gate));
    }
    return grad;
  }
  // Of the input at `slot`, given the gradient of the sum there; moves on to the slot before.
  V step(int64_t slot, V grad) {
    V dx = this->taps[W - 1] * grad;
#pragma GCC unroll 4
    for (int j = 1; j < W; ++j) dx += this->taps[W - 1 - j] * next[j - 1];
    if (dfinal && slot >= this->end - (W - 1)) dx += this->gather(dfinal, slot - (this->end - (W - 1)), this->count);
#pragma GCC unroll 4
    for (int j = W - 2; j > 0; --j) next[j] = next[j - 1];
    next[0] = grad;
    return dx;
  }
};

template <class T, int W>
void conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal, const ConvGradients<T>& out) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  const std::unique_ptr<R[]> part_weight(new R[pieces.items() * channels * W]), part_bias(new R[pieces.items() * channels]);
  zero_padding(out.x, channels, in.documents);
  constexpr int blocks = kConvGroup / kLanes<R>;
  struct Scratch {
    std::vector<V> next = std::vector<V>(blocks * (W - 1)), sums = std::vector<V>(blocks * (W + 1));
  };
  for_each_item(pieces.items() * groups, Scratch{}, [&](Scratch& scratch, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    std::fill(scratch.sums.begin(), scratch.sums.end(), V{});
    for (int64_t p = pieces.bounds[run]; p < pieces.bounds[run + 1]; ++p) {
      const Piece& piece = pieces.all[p];
      const int64_t end = in.documents.ends[piece.document], start = in.documents.starts[piece.document];
      std::fill(scratch.next.begin(), scratch.next.end(), V{});
      // The tokens after the piece, for what they send back into it; then the piece, a block of tokens at a time.
      int64_t last = std::min(end, piece.last + W - 1);
      while (last > piece.first) {
        const bool inside = last <= piece.last;
        const int64_t first = inside ? std::max(piece.first, last - kConvTokens) : piece.last;
        for (int64_t c = from; c < to; c += kLanes<R>) {
          const int64_t b = (c - from) / kLanes<R>;
          V* next = &scratch.next[b * (W - 1)];
          V* sums = &scratch.sums[b * (W + 1)];
          ConvBackward<T, W> block{{in, &parameters[c / kLanes<R> * (W + 1)], piece.document, c}, dy.at(start) + c, dy.token,
                                   dfinal ? dfinal + (piece.document * channels + c) * (W - 1) : nullptr, in.silu, {}, {}};
          for (int j = 0; j < W - 1; ++j) block.next[j] = next[j];
          for (int k = 0; k <= W; ++k) block.sums[k] = sums[k];
          V window[W];
          for (int k = 1; k < W; ++k) window[k - 1] = block.input(last - W + k);
          for (int64_t t = last - 1; t >= first; --t) {
#pragma GCC unroll 4
            for (int k = W - 1; k > 0; --k) window[k] = window[k - 1];
            window[0] = block.input(t - (W - 1));
            const V grad = block.at(t, window);
            const V dx = block.step(t, grad);
            if (!inside) continue;
            store(out.x + t * channels + c, dx, block.count);
#pragma GCC unroll 4
            for (int k = 0; k < W; ++k) block.sums[k] += grad * window[k];
            block.sums[W] += grad;
          }
          for (int j = 0; j < W - 1; ++j) next[j] = block.next[j];
          for (int k = 0; k <= W; ++k) sums[k] = block.sums[k];
          if (first == start && out.initial_state)
            for (int64_t t = start - 1; t >= start - (W - 1); --t) {
              const V value = block.step(t, V{});
              for (int i = 0; i < block.count; ++i)
                out.initial_state[(piece.document * channels + c + i) * (W - 1) + t - start + W - 1] = value[i];
            }
        }
        last = first;
      }
    }
    for (int64_t c = from; c < to; c += kLanes<R>) {
      const V* sums = &scratch.sums[(c - from) / kLanes<R> * (W + 1)];
      const int count = int(std::min<int64_t>(kLanes<R>, channels - c));
      for (int i = 0; i < count; ++i)
        for (int k = 0; k < W; ++k) part_weight[(run * channels + c + i) * W + k] = sums[k][i];
      store(&part_bias[run * channels + c], sums[W], count);
    }
  });
  sum_parts(part_weight.get(), pieces.items(), channels * W, channels * W, out.weight);
  sum_parts(part_bias.get(), pieces.items(), channels, channels, out.bias);
}

// Calls body(constant W).
template <class Body> void with_taps(int taps, const Body& body) {
  if (taps == 2) body(std::integral_constant<int, 2>{});
  if (taps == 3) body(std::integral_constant<int, 3>{});
  if (taps == 4) body(std::integral_constant<int, 4>{});
}

}  // namespace packmamba

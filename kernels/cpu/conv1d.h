// The depthwise causal convolution over packed documents, forward and backward:
//   y_t = act(bias + sum_k weight_k x_{t - (W - 1) + k}),  act the identity or SiLU.
//
// Who holds what. A work item is a run of pieces of documents times a group of channels, and one
// thread takes it:
//
//   tokens of a document    0          256        512
//                           | piece    | piece    | piece |        short documents are joined
//   tokens of a piece       | 4 | 4 | 4 | ...                      blocks, front to back (backward:
//                                                                  back to front)
//   channels of a block     | tile: 128 | tile: 128 | ...          along its 4 rows
//   channels of a tile      vectors of lanes, 4 side by side       lanes are neighbouring channels
//
// Rows are read and written in stretches that the memory likes. The backward walks from a piece's
// last block to its first, and begins with the W - 1 tokens after it.
//
// In the first-level cache, per thread: sums and gradients of a block and a tile, 4 x 128 numbers
// each.
// Bound: memory. Bytes per token and channel: forward reads x and writes y; backward reads x and dy
// and writes dx.
#pragma once
#include "tensors.h"

namespace packmamba {

constexpr int kConvTokens = 4;  // of a block: at least W - 1, and a divisor of kPieceTokens
// Channels of a tile: single lines of several rows, written in turns, take twice the time.
constexpr int kConvTile = 128;
constexpr int kConvGroup = 2048;  // channels of a work item: whole rows, unless they are very wide
constexpr int kSideBySide = 4;    // vectors
// Cuts long documents and joins short ones; bounds the partial sums of dweight.
constexpr int64_t kPieceTokens = 256;
// Before SiLU, weights and bias are multiplied by -log2(e), so that exp2 of a sum is what the
// sigmoid needs. The sums' gradients are divided by it: the inputs' gradients come out right, and
// those of weights and bias have to be multiplied by it.
constexpr double kSiluScale = -1.4426950408889634;

template <class T>
struct ConvArguments {
  using R = accumulate_t<T>;
  Rows<const T> x;         // (B, L, D)
  const R* weight;         // (D, W)
  const R* bias;           // (D,) or null
  const R* initial_state;  // (S, D, W - 1): the inputs before a document; null: zero
  bool silu;
  Documents documents;
  int64_t channels;  // D
  int taps;          // W

  ConvArguments(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const Tensor& starts, const Tensor& ends, const OptionalTensor& initial_state,
                bool silu)
      : x(x),
        weight(pointer<const R>(weight)),
        bias(pointer<const R>(bias)),
        initial_state(pointer<const R>(initial_state)),
        silu(silu),
        documents(starts, ends, x),
        channels(weight.size(0)),
        taps(int(weight.size(1))) {}
  // Whether an output goes past the caches, which takes whole lines.
  bool past_caches(const T* out) const {
    return documents.slots * channels * int64_t(sizeof(T)) >= kLargeBytes &&
           channels * int64_t(sizeof(T)) % kLineBytes == 0 &&
           reinterpret_cast<uintptr_t>(out) % kLineBytes == 0;
  }
};

// Tokens [first, last) of a document.
struct Piece {
  int64_t document, first, last;
};

// Pieces, and where each work item's run of them begins (one more entry than items).
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> bounds;  // places among all pieces

  explicit Pieces(const Documents& documents) {
    int64_t tokens = kPieceTokens;
    for (int64_t document = 0; document < documents.count; ++document) {
      for (int64_t token = documents.starts[document]; token < documents.ends[document];
           token += kPieceTokens) {
        if (tokens >= kPieceTokens) {
          bounds.push_back(int64_t(all.size()));
          tokens = 0;
        }
        all.push_back(
            {document, token, std::min<int64_t>(documents.ends[document], token + kPieceTokens)});
        tokens += all.back().last - token;
      }
    }
    bounds.push_back(int64_t(all.size()));
  }
  int64_t items() const { return int64_t(bounds.size()) - 1; }
};

// What is the same for every token of one vector of channels.
template <class V, int W>
struct Filter {
  V taps[W], bias;
  [[gnu::always_inline]] explicit Filter(const V* parameters) : bias(in_register(parameters[W])) {
#pragma GCC unroll 4
    for (int tap = 0; tap < W; ++tap)
      taps[tap] = in_register(parameters[tap]);
  }
  // The sums of a block's tokens. Each input is done with before the next: all at once they leave
  // no registers.
  [[gnu::always_inline]] void apply(const V* inputs, V* sums) const {
    constexpr int n = kConvTokens;
    SIDE_BY_SIDE sums[j] = bias;
#pragma GCC unroll 16
    for (int i = 0; i < n + W - 1; ++i) {
      const V input = in_register(inputs[i]);
      SIDE_BY_SIDE if (j <= i && i < j + W) sums[j] += taps[i - j] * input;
    }
  }
  // What an input receives from the sums at its own token and at the W - 1 after it.
  [[gnu::always_inline]] V input_gradient(const V* of_sums) const {
    V dx = taps[W - 1] * of_sums[0];
#pragma GCC unroll 4
    for (int i = 1; i < W; ++i)
      dx += taps[W - 1 - i] * of_sums[i];
    return dx;
  }
};

// Up to kConvTokens tokens of a document.
template <class T, int W>
struct ConvBlock {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  static constexpr int lanes = kLanes<R>;
  static constexpr int inputs = kConvTokens + W - 1;

  const ConvArguments<T>& in;
  int64_t document;
  int64_t start;  // the document's first slot
  int64_t first;  // the block's first slot
  int count;      // tokens
  bool inner;     // all tokens are there, and all their inputs are the document's
  const T* x;     // of the first token
  int64_t step;   // elements from a token to the next

  ConvBlock(const ConvArguments<T>& in, int64_t document, int64_t first, int64_t last)
      : in(in),
        document(document),
        start(in.documents.starts[document]),
        first(first),
        count(int(std::min<int64_t>(kConvTokens, last - first))),
        inner(count == kConvTokens && first - (W - 1) >= start),
        x(in.x.at(start) + (first - start) * in.x.token),
        step(in.x.token) {}
  int lanes_at(int64_t channel) const {
    return int(std::min<int64_t>(lanes, in.channels - channel));
  }

  // The inputs of the tokens at a vector of channels, from W - 1 tokens before the first; zero
  // after the last.
  template <bool whole>
  [[gnu::always_inline]] void load_inputs(int64_t channel, V* to) const {
    if (whole || (inner && channel + lanes <= in.channels)) {
      const T* from = x - (W - 1) * step + channel;
#pragma GCC unroll 16
      for (int i = 0; i < inputs; ++i)
        to[i] = load(from + i * step);
    } else {
      for (int i = 0; i < inputs; ++i)
        to[i] = input(channel, i - (W - 1));
    }
  }
  V input(int64_t channel, int64_t position) const {
    if (position >= count) return V{};
    if (first + position >= start) return load(x + position * step + channel, lanes_at(channel));
    return in.initial_state ? state(in.initial_state, channel, first + position - start) : V{};
  }
  // (S, D, W - 1) states; places are negative, from the end.
  V state(const R* from, int64_t channel, int64_t position) const {
    R values[lanes] = {};
    from += (document * in.channels + channel + 1) * (W - 1) + position;
    for (int i = 0; i < lanes_at(channel); ++i)
      values[i] = from[i * (W - 1)];
    return bit_load<V>(values);
  }
  void put_state(R* to, int64_t channel, int64_t position, V value) const {
    to += (document * in.channels + channel + 1) * (W - 1) + position;
    for (int i = 0; i < lanes_at(channel); ++i)
      to[i * (W - 1)] = value[i];
  }
};

// A block's tokens times `width` channels, at most kConvTile, in steps, which keep their values in
// registers. `whole`: the block is inner, and the channels are whole vectors, side by side.
template <class T, int W>
struct ConvTile {
  using Block = ConvBlock<T, W>;
  using R = typename Block::R;
  using V = typename Block::V;
  static constexpr int lanes = Block::lanes;
  static constexpr int vectors = kConvTile / lanes;
  static constexpr int n = kSideBySide;
  using Values = V[kConvTokens][vectors];
  Values sums = {};
  Values gradients = {};

  static bool whole_vectors(int width) { return width % (n * lanes) == 0; }

  // `sums` of the channels from the given one.
  template <bool whole>
  [[gnu::always_inline]] void apply(const Block& block, int64_t from, int width,
                                    const V* parameters) {
    constexpr int n = kConvTokens;
    const int used = (width + lanes - 1) / lanes;
#pragma GCC unroll 1
    for (int vector = 0; vector < used; ++vector) {
      const Filter<V, W> filter(parameters + vector * (W + 1));
      V window[Block::inputs], sum[n];
      block.template load_inputs<whole>(from + vector * lanes, window);
      filter.apply(window, sum);
      SIDE_BY_SIDE sums[j][vector] = sum[j];
    }
  }
  // 1 + exp(-sum).
  [[gnu::always_inline]] static void denominators(const V* sums, V* to) {
    V fraction[n], exponent[n];
    split_exp2<n>(sums, fraction, exponent);
    join_exp2<n>(fraction, exponent, to);
    SIDE_BY_SIDE to[j] += R(1);
  }
  // SiLU of the sums, to rows of a contiguous tensor. Meanwhile the inputs of the next block come,
  // from `ahead`.
  template <bool whole>
  [[gnu::always_inline]] void put_silu(const Block& block, T* rows, int width, const T* ahead,
                                       bool past_caches) const {
    const int used = (width + lanes - 1) / lanes;
#pragma GCC unroll 1
    for (int token = 0; token < (whole ? kConvTokens : block.count);
         ++token, rows += block.in.channels)
#pragma GCC unroll 1
      for (int vector = 0; vector < used; vector += n) {
        if (whole) prefetch(ahead + token * block.step + vector * lanes);
        V y[n];
        denominators(&sums[token][vector], y);
        SIDE_BY_SIDE y[j] = sums[token][vector + j] * R(1 / kSiluScale) / y[j];
        put<whole>(y, rows + vector * lanes, width - vector * lanes, past_caches);
      }
  }
  // The sums themselves, or what took their place.
  template <bool whole>
  [[gnu::always_inline]] void put_sums(const Block& block, T* rows, int width,
                                       bool past_caches) const {
    const int used = (width + lanes - 1) / lanes;
#pragma GCC unroll 1
    for (int token = 0; token < (whole ? kConvTokens : block.count);
         ++token, rows += block.in.channels)
#pragma GCC unroll 4
      for (int vector = 0; vector < used; vector += n)
        put<whole>(&sums[token][vector], rows + vector * lanes, width - vector * lanes,
                   past_caches);
  }
  // The gradients of the sums, from rows of the outputs'; for SiLU, with s the sigmoid, dy s (1 +
  // sum (1 - s)).
  template <bool whole>
  [[gnu::always_inline]] void make_gradients(const Block& block, bool silu, const T* dy,
                                             int64_t step, int width, const T* ahead,
                                             const T* dy_ahead) {
    const int used = (width + lanes - 1) / lanes;
#pragma GCC unroll 1
    for (int token = 0; token < kConvTokens; ++token) {
      if (!whole && token >= block.count) {
        std::fill(gradients[token], gradients[token] + vectors, V{});
        continue;
      }
#pragma GCC unroll 1
      for (int vector = 0; vector < used; vector += n) {
        if (whole) {
          prefetch(ahead + token * block.step + vector * lanes);
          prefetch(dy_ahead + token * step + vector * lanes);
        }
        V slope[n], g[n];
        if (silu) {
          denominators(&sums[token][vector], slope);
          SIDE_BY_SIDE slope[j] = R(1 / kSiluScale) / slope[j];
          SIDE_BY_SIDE slope[j] *= R(1) + sums[token][vector + j] * (R(1 / kSiluScale) - slope[j]);
        }
        get<whole>(g, dy + token * step + vector * lanes, width - vector * lanes);
        SIDE_BY_SIDE gradients[token][vector + j] = silu ? g[j] * slope[j] : g[j];
      }
    }
  }
  // One vector of channels: the sums' gradients go to the totals of the taps and the bias, and to
  // the inputs' gradients, which take the sums' place. `after` holds the gradients of the W - 1
  // sums after the block, then those of its first.
  template <bool whole>
  [[gnu::always_inline]] void distribute(const Block& block, int64_t channel, int vector,
                                         const Filter<V, W>& filter, V* after, V* totals) {
    constexpr int n = kConvTokens;
    V of_sums[Block::inputs], window[Block::inputs], total[W + 1];
    SIDE_BY_SIDE of_sums[j] = in_register(gradients[j][vector]);
#pragma GCC unroll 4
    for (int i = 0; i < W - 1; ++i)
      of_sums[n + i] = in_register(after[i]);
#pragma GCC unroll 4
    for (int i = 0; i < W - 1; ++i)
      after[i] = of_sums[i];
    SIDE_BY_SIDE sums[j][vector] = filter.input_gradient(of_sums + j);
    block.template load_inputs<whole>(channel, window);
#pragma GCC unroll 5
    for (int tap = 0; tap <= W; ++tap)
      total[tap] = totals[tap];
#pragma GCC unroll 16
    for (int i = 0; i < n + W - 1; ++i) {
      const V input = in_register(window[i]);
      SIDE_BY_SIDE if (j <= i && i < j + W) total[i - j] += of_sums[j] * input;
    }
    SIDE_BY_SIDE total[W] += of_sums[j];
#pragma GCC unroll 5
    for (int tap = 0; tap <= W; ++tap)
      totals[tap] = total[tap];
  }
  // The first `count` channels of n vectors.
  template <bool whole>
  [[gnu::always_inline]] static void get(V* to, const T* from, int count) {
    if (whole || count >= n * lanes) {
      SIDE_BY_SIDE to[j] = load(from + j * lanes);
    } else {
      for (int j = 0; j < n; ++j)
        to[j] = load(from + j * lanes, std::clamp(count - j * lanes, 0, lanes));
    }
  }
  template <bool whole>
  [[gnu::always_inline]] static void put(const V* from, T* to, int count, bool past_caches) {
    if ((whole || count >= n * lanes) && past_caches) {
      SIDE_BY_SIDE stream(to + j * lanes, from[j]);
    } else if (whole || count >= n * lanes) {
      SIDE_BY_SIDE store(to + j * lanes, from[j]);
    } else {
      for (int j = 0; j * lanes < count; ++j)
        store(to + j * lanes, from[j], std::min(lanes, count - j * lanes));
    }
  }
  // n vectors, between arithmetic: a whole tile at once waits for the memory.
  [[gnu::always_inline]] static void prefetch(const T* from) {
#pragma GCC unroll 8
    for (int channel = 0; channel < n * lanes; channel += kLineBytes / int(sizeof(T)))
      __builtin_prefetch(from + channel, 0, 3);
  }
};

// [block][W taps, then the bias] vectors.
template <class T, int W>
std::vector<Vec<accumulate_t<T>>> conv_parameters(const ConvArguments<T>& in) {
  using R = accumulate_t<T>;
  const R scale = in.silu ? R(kSiluScale) : R(1);
  std::vector<Vec<R>> parameters;
  for (int64_t channel = 0; channel < in.channels; channel += kLanes<R>) {
    const int count = int(std::min<int64_t>(kLanes<R>, in.channels - channel));
    for (int tap = 0; tap < W; ++tap) {
      R lanes[kLanes<R>] = {};
      for (int lane = 0; lane < count; ++lane)
        lanes[lane] = scale * in.weight[(channel + lane) * W + tap];
      parameters.push_back(bit_load<Vec<R>>(lanes));
    }
    parameters.push_back(in.bias ? scale * load(in.bias + channel, count) : Vec<R>{});
  }
  return parameters;
}

template <class T, int W>
void conv_forward(const ConvArguments<T>& in, T* y, accumulate_t<T>* final_state) {
  using Block = ConvBlock<T, W>;
  using Tile = ConvTile<T, W>;
  const int64_t channels = in.channels;
  const int64_t groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  const bool past_caches = in.past_caches(y);
  begin_output(y, channels, in.documents);
  for_each_item(pieces.items() * groups, Tile{}, [&](Tile& tile, int64_t item) {
    const int64_t from = item % groups * kConvGroup;
    const int64_t to = std::min(channels, from + kConvGroup);
    const int64_t run = item / groups;
    for (int64_t number = pieces.bounds[run]; number < pieces.bounds[run + 1]; ++number) {
      const Piece& piece = pieces.all[number];
      for (int64_t first = piece.first; first < piece.last; first += kConvTokens) {
        const Block block(in, piece.document, first, piece.last);
        const T* ahead =
            first + 2 * kConvTokens <= piece.last ? block.x + kConvTokens * block.step : block.x;
        for (int64_t channel = from; channel < to; channel += kConvTile) {
          const int width = int(std::min<int64_t>(kConvTile, to - channel));
          const auto work = [&](auto whole) __attribute__((always_inline)) {
            tile.template apply<whole>(block, channel, width,
                                       &parameters[channel / Block::lanes * (W + 1)]);
            T* rows = y + first * channels + channel;
            if (!in.silu)
              tile.template put_sums<whole>(block, rows, width, past_caches);
            else if (past_caches)
              tile.template put_silu<whole>(block, rows, width, ahead + channel, true);
            else
              tile.template put_silu<whole>(block, rows, width, ahead + channel, false);
          };
          if (block.inner && Tile::whole_vectors(width))
            work(std::true_type{});
          else
            work(std::false_type{});
        }
      }
      if (final_state == nullptr || piece.last != in.documents.ends[piece.document]) continue;
      const Block after(in, piece.document, piece.last, piece.last);
      for (int64_t channel = from; channel < to; channel += Block::lanes)
        for (int place = 1 - W; place < 0; ++place)
          after.put_state(final_state, channel, place, after.input(channel, place));
    }
    end_stream();
  });
}

// Gradients.
template <class T>
struct ConvGradients {
  using R = accumulate_t<T>;
  T* x;              // (B, L, D), contiguous
  R* weight;         // (D, W)
  R* bias;           // (D,) or null
  R* initial_state;  // (S, D, W - 1) or null
};

template <class T, int W>
void conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal,
                   const ConvGradients<T>& out) {
  using Block = ConvBlock<T, W>;
  using Tile = ConvTile<T, W>;
  using R = typename Block::R;
  using V = typename Block::V;
  constexpr int lanes = Block::lanes;
  constexpr int n = kConvTokens;
  const int64_t channels = in.channels;
  const int64_t groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  const std::unique_ptr<R[]> part_weight(new R[pieces.items() * channels * W]);
  const std::unique_ptr<R[]> part_bias(new R[pieces.items() * channels]);
  const bool past_caches = in.past_caches(out.x);
  begin_output(out.x, channels, in.documents);
  // Of each vector of channels: the gradients of the W - 1 sums after a block; gradients of the
  // taps, then of the bias.
  struct Scratch {
    Tile tile;
    std::vector<V> after = std::vector<V>(kConvGroup / lanes * (W - 1));
    std::vector<V> totals = std::vector<V>(kConvGroup / lanes * (W + 1));
  };
  for_each_item(pieces.items() * groups, Scratch{}, [&](Scratch& scratch, int64_t item) {
    const int64_t from = item % groups * kConvGroup;
    const int64_t to = std::min(channels, from + kConvGroup);
    const int64_t run = item / groups;
    Tile& tile = scratch.tile;
    std::fill(scratch.totals.begin(), scratch.totals.end(), V{});
    for (int64_t number = pieces.bounds[run]; number < pieces.bounds[run + 1]; ++number) {
      const Piece& piece = pieces.all[number];
      const int64_t start = in.documents.starts[piece.document];
      const int64_t end = in.documents.ends[piece.document];
      std::fill(scratch.after.begin(), scratch.after.end(), V{});
      const int64_t blocks = (piece.last - piece.first + n - 1) / n;
      for (int64_t block_number = piece.last < end ? blocks : blocks - 1; block_number >= 0;
           --block_number) {
        const bool inside = block_number < blocks;
        const int64_t first = piece.first + block_number * n;
        const int64_t last = inside ? piece.last : std::min(end, first + W - 1);
        const Block block(in, piece.document, first, last);
        const T* dy_row = dy.at(first);
        const bool more = inside && first - n >= piece.first;
        const T* ahead = more ? block.x - n * block.step : block.x;
        const T* dy_ahead = more ? dy_row - n * dy.token : dy_row;
        const bool near_state = !inside || (dfinal && first + n > end - (W - 1));
        for (int64_t tile_from = from; tile_from < to; tile_from += kConvTile) {
          const V* parameter = &parameters[tile_from / lanes * (W + 1)];
          V* tile_after = &scratch.after[(tile_from - from) / lanes * (W - 1)];
          V* tile_totals = &scratch.totals[(tile_from - from) / lanes * (W + 1)];
          T* dx = out.x + first * channels + tile_from;
          const int width = int(std::min<int64_t>(kConvTile, to - tile_from));
          const auto prepare = [&](auto whole) __attribute__((always_inline)) {
            const auto make = [&](bool silu) __attribute__((always_inline)) {
              tile.template make_gradients<whole>(block, silu, dy_row + tile_from, dy.token, width,
                                                  ahead + tile_from, dy_ahead + tile_from);
            };
            if (!in.silu) return make(false);
            tile.template apply<whole>(block, tile_from, width, parameter);
            make(true);
          };
          if (block.inner && !near_state && Tile::whole_vectors(width)) {
            prepare(std::true_type{});
#pragma GCC unroll 1
            for (int vector = 0; vector * lanes < width; ++vector)
              tile.template distribute<true>(block, tile_from + vector * lanes, vector,
                                             Filter<V, W>(parameter + vector * (W + 1)),
                                             tile_after + vector * (W - 1),
                                             tile_totals + vector * (W + 1));
            tile.template put_sums<true>(block, dx, width, past_caches);
            continue;
          }
          prepare(std::false_type{});
          for (int vector = 0; vector * lanes < width; ++vector) {
            const int64_t channel = tile_from + vector * lanes;
            const Filter<V, W> filter(parameter + vector * (W + 1));
            V* after = tile_after + vector * (W - 1);
            V* totals = tile_totals + vector * (W + 1);
            if (!inside) {
              for (int i = 0; i < W - 1; ++i)
                after[i] = tile.gradients[i][vector];
              continue;
            }
            tile.template distribute<false>(block, channel, vector, filter, after, totals);
            // The final state holds the last W - 1 inputs; the initial state, those before the
            // document.
            const auto of_final = [&](int64_t token) {
              return dfinal && token >= end - (W - 1) ? block.state(dfinal, channel, token - end)
                                                      : V{};
            };
            for (int64_t token = std::max(first, end - (W - 1));
                 dfinal && token < first + block.count; ++token)
              tile.sums[token - first][vector] += of_final(token);
            if (first > start || !out.initial_state) continue;
            V of_sums[2 * (W - 1)] = {};
            std::copy(after, after + W - 1, of_sums + W - 1);
            for (int place = 1 - W; place < 0; ++place)
              block.put_state(
                  out.initial_state, channel, place,
                  filter.input_gradient(of_sums + W - 1 + place) + of_final(start + place));
          }
          if (inside) tile.template put_sums<false>(block, dx, width, past_caches);
        }
      }
    }
    end_stream();
    const R scale = in.silu ? R(kSiluScale) : R(1);
    for (int64_t channel = from; channel < to; channel += lanes) {
      const V* totals = &scratch.totals[(channel - from) / lanes * (W + 1)];
      const int count = int(std::min<int64_t>(lanes, channels - channel));
      for (int i = 0; i < count; ++i)
        for (int tap = 0; tap < W; ++tap)
          part_weight[(run * channels + channel + i) * W + tap] = scale * totals[tap][i];
      store(&part_bias[run * channels + channel], scale * totals[W], count);
    }
  });
  sum_parts(part_weight.get(), pieces.items(), channels * W, channels * W, out.weight);
  sum_parts(part_bias.get(), pieces.items(), channels, channels, out.bias);
}

// Calls body(constant W).
template <class Body>
void with_taps(int taps, const Body& body) {
  if (taps == 2) body(std::integral_constant<int, 2>{});
  if (taps == 3) body(std::integral_constant<int, 3>{});
  if (taps == 4) body(std::integral_constant<int, 4>{});
}

}  // namespace packmamba

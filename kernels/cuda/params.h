// What Python hands to the kernels: plain pointers, sizes and strides. Nothing here knows PyTorch.
//
// Shapes: B rows, L slots of a row, S documents, D channels, N states of a channel, W taps. A slot
// is a place in a row, a token or padding; slots are counted over all rows, 0 to B L - 1.
//
//   slot       0                            L                           2 L
//   row 0      | document 0 | document 1 |..|     .. padding
//   row 1                                   | document 2             |..|
//
//   starts     slots of documents' first tokens      (S,) int32, increasing
//   ends       slots after their last tokens         (S,) int32; no document crosses rows
//   segment    up to cut_length tokens of a document, as a warp walks them
//   item       the segments that one warp (or block) walks in turn: a document, several short ones,
//              or one segment of a document so long that its segments are walked at once
//
// A kernel's grid is (blocks of channels) x (items); what bounds each kernel, and its bytes, are at
// the head of its file.
#pragma once
#include <cuda_runtime.h>
#include <climits>
#include <cstdint>

enum class Dtype : int { bfloat16, float16, float32 };
inline int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// A (B, L, *) input with unit stride along its last dimension.
struct View {
  const void* data;      // of row 0, slot 0; null: an absent argument
  int64_t row_bytes;     // from a row to the next
  uint32_t token_bytes;  // from a slot to the next, below 2^31
};

constexpr int CONV_TILE = 64;  // slots between places where the convolution finds its document
// Tokens between saved states, counted from a document's start.
constexpr int SAVE_EVERY = 32;        // in bfloat16, by scan16
constexpr int SAVE_EVERY_FLOAT = 64;  // in float32, by scan_any: as many bytes

// How a batch is made into work.
//
// A document is walked in segments that end at multiples of cut_length tokens from its token 0:
// there its state is the combination of the segment's start and of its end from zero, so that the
// bits are the same whether one work item walks segments in turn, or several walk them at once,
// which happens to documents longer than cut_above. (scan_any, whose cut_above is cut_length,
// always walks them at once, and does not combine a document's last state.) Documents that begin in the same window of
// slots, but those longer than it, share a work item.
struct Plan {
  int documents;   // S
  int rows;        // B
  int row_length;  // L
  int cut_above;   // tokens
  int cut_length;  // tokens, a multiple of SAVE_EVERY_FLOAT; INT_MAX: no document reaches a multiple
  int window;      // slots

  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
  __host__ __device__ int64_t tiles() const {
    return rows * ((row_length + CONV_TILE - 1) / CONV_TILE);
  }
  // Without combinations kernels that never walk from zero are launched.
  bool combines() const { return cut_length < INT_MAX; }
  bool cuts() const { return documents > 0 && row_length > cut_above; }

  // Capacities, the most that there can be: n tokens of a document, from any of its tokens on, are
  // at most n / cut_length + 2 segments.
  int64_t cut_documents() const { return cuts() ? slots() / cut_above : 0; }
  int64_t cut_segments() const { return cuts() ? slots() / cut_length + 2 * cut_documents() : 0; }
  int64_t segments() const {
    return combines() ? 2 * (int64_t)documents + slots() / cut_length : documents;
  }
  // At most two items begin in a window, one of short documents and one of a long document, but for
  // those beside cut documents.
  int64_t items() const {
    const int64_t most = 2 * ((slots() + window - 1) / window) + cut_segments() + cut_documents();
    return segments() < most ? segments() : most;
  }
};

// How the convolution's slots are shared out: spans of neighbouring slots of a row.
struct Spans {
  int channel_blocks;  // blocks of the grid along channels
  int rows;            // B
  int row_length;      // L
  int per_row;         // spans of a row
  int length;          // slots of a span
  int64_t count() const { return (int64_t)rows * per_row; }
};

// The table that schedule.cu makes once per batch and plan (forward's, backward's). Every kernel of
// every layer reads it; it lies in one int32 tensor, parts in the order of the members.
struct Schedule {
  int* counts;          // (4,): items, segments, cut segments, cut documents
  int4* segments;       // first slot; end slot; document with flags; place among cut segments or -1
  int4* cut_documents;  // first cut segment; number of segments; document; unused
  int2* items;          // first segment; end segment; longest first
  int2* unsorted;       // items before they are sorted
  int* cut_segments;    // of each cut segment its place among all segments
  int* row_ends;        // (B,): the slot after each row's last token
  int* tile_documents;  // (B tiles,): the first document that ends after a tile of CONV_TILE slots
                        // begins

  // On the host alone: capacities, from which grids are made.
  int max_items;
  int max_cut_segments;
  int max_cut_documents;
  bool combines;

  Schedule() = default;
  Schedule(int* memory, const Plan& plan)
      : counts(memory),
        segments((int4*)(memory + 4)),
        cut_documents(segments + plan.segments()),
        items((int2*)(cut_documents + plan.cut_documents())),
        unsorted(items + plan.items()),
        cut_segments((int*)(unsorted + plan.items())),
        row_ends(cut_segments + plan.cut_segments()),
        tile_documents(row_ends + plan.rows),
        max_items(plan.items()),
        max_cut_segments(plan.cut_segments()),
        max_cut_documents(plan.cut_documents()),
        combines(plan.combines()) {}

  // Ints of the table.
  static int64_t size(const Plan& plan) {
    return 4 + 4 * (plan.segments() + plan.cut_documents()) + 4 * plan.items() +
           plan.cut_segments() + plan.rows + plan.tiles();
  }
};

// A segment's flags: its first token, or the one after its last, is at a multiple of cut_length
// above 0 of the whole document.
constexpr int STARTS_AT_CUT = 1;
constexpr int ENDS_AT_CUT = 2;
__host__ __device__ constexpr int with_flags(int document, bool starts, bool ends) {
  return document << 2 | (starts ? STARTS_AT_CUT : 0) | (ends ? ENDS_AT_CUT : 0);
}
__host__ __device__ constexpr int document_of(int4 segment) { return segment.z >> 2; }

// Arguments of the selective scan,
//   dt = softplus(delta + bias);  h_t = exp(dt A) h_{t-1} + dt u B_t;
//   y_t = (C_t . h_t + D u) silu(z).
// "T" is the activations' dtype. Pointers are null where the argument is absent.
struct ScanParams {
  // Inputs: (B, L, D) of T; B and C (B, L, N); dy of the backward. z absent: no gate.
  View u, delta, z, B, C, dy;
  const float* A;              // (D, N)
  const float* D;              // (D,) or null
  const float* bias;           // (D,) or null
  const float* initial_state;  // (S, D, N) or null: zero
  const float* dfinal;         // (S, D, N) or null: zero
  const int* starts;           // (S,)
  const int* ends;             // (S,)
  Schedule schedule;

  // Outputs of T, contiguous (B, L, D).
  void* y;       // null in a backward that need not write it again
  void* du;      // backward
  void* ddelta;  // backward
  // Outputs of T that may be slices of a wider contiguous tensor's last dimension.
  void* dz;          // (B, L, D); null without a gate
  void* dB;          // (B, L, N)
  void* dC;          // (B, L, N)
  int64_t dz_token;  // elements from a slot to the next, over all rows
  int64_t dB_token;
  int64_t dC_token;

  float* final_state;   // (S, D, N) or null
  float* dinitial;      // (S, D, N) or null
  void* saved;          // states kept for the backward, see saved_state and Channel::saved
  float* cut_states;    // (cut segments, D, N): what each begins with
  float* cut_sums;      // (cut segments, D): sums of dt
  float* partial_BC;    // (blocks of channels, B L, 2 N): dB, then dC
  float* partial_A;     // (items, D, N)
  float* partial_D;     // (items, D)
  float* partial_bias;  // (items, D)
  float* dA;            // (D, N)
  float* dD;            // (D,) or null
  float* dbias;         // (D,) or null

  int channels;    // D
  int states;      // N
  int rows;        // B
  int row_length;  // L
  int documents;   // S
  bool softplus;   // whether dt is the softplus
  Dtype dtype;     // T
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

// Arguments of the depthwise convolution,
//   y_t = act(bias + sum_k weight_k x_{t - (W - 1) + k}),  act the identity or SiLU.
struct ConvParams {
  View x;                      // (B, L, D) of T
  View dy;                     // the same, backward
  const float* weight;         // (D, W)
  const float* bias;           // (D,) or null
  const float* initial_state;  // (S, D, W - 1): the inputs before a document; null: zero
  const float* dfinal;         // (S, D, W - 1) or null: zero
  const int* starts;           // (S,)
  const int* ends;             // (S,)
  Schedule schedule;

  void* y;             // (B, L, D) of T, contiguous; forward
  void* dx;            // (B, L, D) of T; may be a slice of a wider contiguous tensor
  int64_t dx_token;    // elements from a slot of dx to the next, over all rows
  float* dweight;      // (D, W)
  float* dbias;        // (D,) or null
  float* final_state;  // (S, D, W - 1) or null
  float* dinitial;     // (S, D, W - 1) or null
  float* partial;      // (spans, W + 1, D): dweight, then dbias

  int channels;    // D
  int width;       // W: 2, 3 or 4
  int rows;        // B
  int row_length;  // L
  int documents;   // S
  bool silu;
  Dtype dtype;  // T
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

// Launches a kernel behind another: from compute capability 9.0 on it starts while that one still
// runs. It may read what was there before that one, and the rest after wait_for_previous.
template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// schedule.cu. offsets, (S,) or null: tokens of a document before its part in this batch.
void make_schedule(const int* starts, const int* ends, const int* offsets, const Plan& plan,
                   const Schedule& schedule, cudaStream_t stream);
// Zeros the padding of a (B, L, *) tensor whose slots are token_bytes apart and width_bytes wide.
void zero_padding(void* data, int64_t token_bytes, int64_t width_bytes, const int* row_ends,
                  int rows, int row_length, cudaStream_t stream);

// scan16_*.cu: bfloat16 with 16 states, on tensor cores.
void scan16_forward(const ScanParams& params, cudaStream_t stream);
void scan16_backward(const ScanParams& params, cudaStream_t stream);
constexpr int SCAN16_BLOCK_CHANNELS = 64;
// scan_any.cu: everything else.
void scan_forward(const ScanParams& params, cudaStream_t stream);
void scan_backward(const ScanParams& params, cudaStream_t stream);
int scan_block_channels(int states);  // of the backward: one partial of dB and dC each
void scan_reduce(const ScanParams& params, int channel_blocks, cudaStream_t stream);

// conv1d_*.cu
void conv_forward(const ConvParams& params, cudaStream_t stream);
int64_t conv_partials(const ConvParams& params);  // floats of partials of dweight and dbias
void conv_backward(const ConvParams& params, cudaStream_t stream);

// What Python hands to the kernels: plain pointers, sizes and strides. Nothing here knows PyTorch.
// Shape letters: B rows, L slots of a row, S documents, D channels, N states per channel, W taps.
#pragma once
#include <cuda_runtime.h>
#include <climits>
#include <cstdint>

enum class Dtype : int { bfloat16, float16, float32 };
inline int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// A (B, L, *) tensor with unit stride along its last dimension. Null data: an absent argument.
struct View {
  const void* data;
  int64_t row_bytes;
  uint32_t token_bytes;
};

constexpr int CONV_TILE = 64;   // slots between places where the convolution finds its document
constexpr int SAVE_EVERY = 32;  // tokens between saved states, counted from a document's start

// How a batch is made into work. A document is walked in segments that end at multiples of cut_length tokens (a multiple of
// SAVE_EVERY) from its token 0: there its state is the combination of the segment's start and of its end from zero, so that the
// bits are the same whether segments are walked in turn, by one work item, or at once: those of documents longer than cut_above.
// cut_length is INT_MAX where no document reaches a multiple: then kernels without that second walk are launched.
// Documents that begin in the same window of slots, but those longer than it, share a work item.
struct Plan {
  int documents, rows, row_length, cut_above, cut_length, window;
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
  __host__ __device__ int64_t tiles() const { return rows * ((row_length + CONV_TILE - 1) / CONV_TILE); }
  // Most there can be: n tokens of a document, from any of its tokens on, are at most n / cut_length + 2 segments.
  bool combines() const { return cut_length < INT_MAX; }
  bool cuts() const { return documents > 0 && row_length > cut_above; }
  int64_t cut_documents() const { return cuts() ? slots() / cut_above : 0; }
  int64_t cut_segments() const { return cuts() ? slots() / cut_length + 2 * cut_documents() : 0; }
  int64_t segments() const { return combines() ? 2 * (int64_t)documents + slots() / cut_length : documents; }
  // At most two items of documents begin in a window, one of short ones and one long one, but for those beside cut ones.
  int64_t items() const {
    const int64_t most = 2 * ((slots() + window - 1) / window) + cut_segments() + cut_documents();
    return segments() < most ? segments() : most;
  }
};

// How the convolution's slots are shared out: `per_row` spans of `length` slots each row, and blocks of channels.
struct Spans {
  int channel_blocks, rows, row_length, per_row, length;
  int64_t count() const { return (int64_t)rows * per_row; }
};

// Made by schedule.cu once per batch and plan (forward's, backward's); every kernel of every layer reads it.
struct Schedule {
  int* counts;         // items, segments, cut segments, cut documents
  int4* segments;      // first slot, end slot, document with flags, place among the segments walked at once or -1
  int4* cut_documents; // first cut segment, how many, document
  int2* items;         // first segment, end segment; longest first
  int2* unsorted;
  int* cut_segments;   // their place among all segments
  int* row_ends;       // (B,) the slot after each row's last token
  int* tile_documents; // the first document that ends after each tile of CONV_TILE slots begins
  int max_items, max_cut_segments, max_cut_documents;  // grids are made from these
  bool combines;
  Schedule() = default;
  Schedule(int* memory, const Plan& p)
      : counts(memory), segments((int4*)(memory + 4)), cut_documents(segments + p.segments()),
        items((int2*)(cut_documents + p.cut_documents())), unsorted(items + p.items()), cut_segments((int*)(unsorted + p.items())),
        row_ends(cut_segments + p.cut_segments()), tile_documents(row_ends + p.rows), max_items(p.items()),
        max_cut_segments(p.cut_segments()), max_cut_documents(p.cut_documents()), combines(p.combines()) {}
  static int64_t size(const Plan& p) {
    return 4 + 4 * (p.segments() + p.cut_documents()) + 4 * p.items() + p.cut_segments() + p.rows + p.tiles();
  }
};

// A segment's flags: its first token, or the one after its last, is at a multiple of cut_length above 0 of the whole document.
constexpr int STARTS_AT_CUT = 1, ENDS_AT_CUT = 2;
__host__ __device__ constexpr int with_flags(int document, bool starts, bool ends) {
  return document << 2 | (starts ? STARTS_AT_CUT : 0) | (ends ? ENDS_AT_CUT : 0);
}
__host__ __device__ constexpr int document_of(int4 segment) { return segment.z >> 2; }

struct ScanParams {
  View u, delta, z, B, C, dy;
  const float *A, *D, *bias, *initial_state, *dfinal;
  const int *starts, *ends;
  Schedule schedule;
  void *y, *du, *ddelta;  // contiguous; y null in a backward that need not write it again
  void *dz, *dB, *dC;     // a slice's rows may lie apart:
  int64_t dz_token, dB_token, dC_token;  // elements from a slot to the next, over all rows
  float *final_state, *dinitial;
  void* saved;                                        // states kept for the backward
  float *cut_states, *cut_sums;                       // of cut segments: (C, D, N) and (C, D)
  float *partial_BC, *partial_A, *partial_D, *partial_bias;  // (blocks, slots, 2 N), (items, D, N), (items, D) twice
  float *dA, *dD, *dbias;
  int channels, states, rows, row_length, documents;
  bool softplus;
  Dtype dtype;
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

struct ConvParams {
  View x, dy;
  const float *weight, *bias, *initial_state, *dfinal;
  const int *starts, *ends;
  Schedule schedule;
  void *y, *dx;      // y is contiguous
  int64_t dx_token;  // elements from a slot of dx to the next, over all rows
  float *dweight, *dbias, *final_state, *dinitial;
  float* partial;  // (spans, W + 1, D)
  int channels, width, rows, row_length, documents;
  bool silu;
  Dtype dtype;
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

// A kernel launched behind another starts while that one still runs (from compute capability 9.0 on): it may read what was there
// before that one, and the rest after wait_for_previous.
template <class... P, class... A>
void launch_behind(void (*kernel)(P...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream, A... arguments) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, P(arguments)...);
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

void make_schedule(const int* starts, const int* ends, const int* offsets, const Plan& plan, const Schedule& schedule, cudaStream_t stream);
// Zeros the padding of a (B, L, *) tensor whose slots are token_bytes apart and width_bytes wide.
void zero_padding(void* data, int64_t token_bytes, int64_t width_bytes, const int* row_ends, int rows, int row_length,
                  cudaStream_t stream);

// bfloat16 with 16 states: tensor cores.
void scan16_forward(const ScanParams& p, cudaStream_t stream);
void scan16_backward(const ScanParams& p, cudaStream_t stream);
constexpr int SCAN16_BLOCK_CHANNELS = 64;
// Everything else.
void scan_forward(const ScanParams& p, cudaStream_t stream);
void scan_backward(const ScanParams& p, cudaStream_t stream);
int scan_block_channels(int states);  // of the backward: one partial of dB and dC each
void scan_reduce(const ScanParams& p, int channel_blocks, cudaStream_t stream);

void conv_forward(const ConvParams& p, cudaStream_t stream);
int64_t conv_partials(const ConvParams& p);  // floats of partials of dweight and dbias
void conv_backward(const ConvParams& p, cudaStream_t stream);

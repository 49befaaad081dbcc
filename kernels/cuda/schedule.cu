// The schedule of a batch, made on the device so that the host need not wait; and what makes padding zero.
//
// `schedule`: one block; 1024 threads walk documents, then segments, then items, with running sums, each writing at places known
// from prefix sums: the same bits every time. Segments of long documents are items, short documents that begin in the same window
// of slots share one, and items are sorted by length in quarter octaves by a counting sort, longest first. Some microseconds, once a batch.
// Documents of no tokens, behind all slots, are absent: a graph's layouts have room for more than each batch has.
// `zero_tails`: threads along the bytes of a row's tail. Bytes: those of the padding.
#include "params.h"

namespace {

constexpr int THREADS = 1024;
constexpr int BUCKETS = 64;       // quarter octaves of an item's tokens
constexpr int SORT_THREADS = 256;

// Exclusive sum over the block; total gets the block's sum.
__device__ int block_sum(int v, int& total) {
  __shared__ int warps[THREADS / 32];
  const int lane = threadIdx.x & 31, w = threadIdx.x >> 5;
  int inclusive = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int up = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += up;
  }
  __syncthreads();
  if (lane == 31) warps[w] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    before += i < w ? warps[i] : 0;
    total += warps[i];
  }
  return before + inclusive - v;
}

__device__ int bucket(int tokens) {  // 0 is the longest
  const int octave = 31 - __clz(tokens), quarter = (octave >= 2 ? tokens >> (octave - 2) : tokens << (2 - octave)) & 3;
  return max(0, BUCKETS - 1 - (4 * octave + quarter));
}

// The first document that ends after a slot: a binary search.
__device__ int first_ending_after(const int* ends, int documents, int64_t slot) {
  int a = 0, b = documents;
  while (a < b) {
    const int mid = (a + b) / 2;
    if (ends[mid] > slot) b = mid;
    else a = mid + 1;
  }
  return a;
}

__global__ void __launch_bounds__(THREADS) schedule(const int* starts, const int* ends, const int* offsets, const __grid_constant__ Plan plan,
                                                    const __grid_constant__ Schedule out) {
  const int documents = plan.documents, rows = plan.rows, row_length = plan.row_length, window = plan.window;
  int4* const segments = out.segments;
  int2* const unsorted = out.unsorted;
  __shared__ int sorted[BUCKETS * SORT_THREADS / 4];
  const int me = threadIdx.x;
  int total;

  int num_segments = 0, num_cut = 0, num_cut_documents = 0;
  for (int base = 0; base < documents; base += THREADS) {
    const int d = base + me;
    const int start = d < documents ? starts[d] : 0, end = d < documents ? ends[d] : 0, length = end - start;
    const int offset = offsets && d < documents ? offsets[d] : 0, past = offset % plan.cut_length;
    // To the first multiple of cut_length, or, where no token that saves a state lies there, to the next one that does.
    const int first_length = plan.cut_length - past / SAVE_EVERY * SAVE_EVERY;
    const int rest = length - first_length;
    const int pieces = rest > 0 ? 1 + (rest + plan.cut_length - 1) / plan.cut_length : length > 0;
    const bool cut = length > plan.cut_above && pieces > 1;
    int segment = num_segments + block_sum(pieces, total);
    num_segments += total;
    int place = num_cut + block_sum(cut ? pieces : 0, total);
    num_cut += total;
    const int cut_document = num_cut_documents + block_sum(cut, total);
    num_cut_documents += total;
    if (cut) out.cut_documents[cut_document] = make_int4(place, pieces, d, 0);
    int64_t first = start, next = start + (int64_t)first_length;
    for (int i = 0; i < pieces; i++, segment++, first = next, next += plan.cut_length) {
      const int tagged = with_flags(d, i > 0 || (offset > 0 && past == 0), next <= end);
      segments[segment] = make_int4(first, min(next, (int64_t)end), tagged, cut ? place + i : -1);
      if (cut) out.cut_segments[place + i] = segment;
    }
  }
  __syncthreads();

  int num_items = 0;
  for (int base = 0; base < num_segments; base += THREADS) {
    const int i = base + me;
    bool begins = false;
    if (i < num_segments) {
      const int4 a = segments[i], b = segments[max(i - 1, 0)];
      const int da = document_of(a), db = document_of(b), at = starts[da], previous = starts[db];
      begins = a.x > at ? a.w >= 0
                        : i == 0 || at / window != previous / window || ends[da] - at > window || ends[db] - previous > window ||
                              a.w >= 0 || b.w >= 0;
    }
    const int item = num_items + block_sum(begins, total);
    num_items += total;
    if (begins) unsorted[item].x = i;
  }
  __syncthreads();
  for (int i = me; i < num_items; i += THREADS) unsorted[i].y = i + 1 < num_items ? unsorted[i + 1].x : num_segments;
  __syncthreads();

  auto tokens = [&](int i) { return segments[unsorted[i].y - 1].y - segments[unsorted[i].x].x; };
  // Counting sort: a quarter of the buckets at a time, each thread a run of items, counts in bucket-major order.
  const int run = (num_items + SORT_THREADS - 1) / SORT_THREADS;
  int placed = 0;
  for (int quarter = 0; quarter < 4; quarter++) {
    const int low = quarter * BUCKETS / 4, high = low + BUCKETS / 4;
    for (int i = me; i < BUCKETS * SORT_THREADS / 4; i += THREADS) sorted[i] = 0;
    __syncthreads();
    if (me < SORT_THREADS)
      for (int i = me * run; i < min(num_items, (me + 1) * run); i++) {
        const int k = bucket(tokens(i));
        if (k >= low && k < high) sorted[(k - low) * SORT_THREADS + me]++;
      }
    __syncthreads();
    constexpr int EACH = BUCKETS * SORT_THREADS / 4 / THREADS;
    int mine = 0;
    for (int i = 0; i < EACH; i++) mine += sorted[me * EACH + i];
    int at = placed + block_sum(mine, total);
    placed += total;
    for (int i = 0; i < EACH; i++) {
      const int n = sorted[me * EACH + i];
      sorted[me * EACH + i] = at;
      at += n;
    }
    __syncthreads();
    if (me < SORT_THREADS)
      for (int i = me * run; i < min(num_items, (me + 1) * run); i++) {
        const int k = bucket(tokens(i));
        if (k >= low && k < high) out.items[sorted[(k - low) * SORT_THREADS + me]++] = unsorted[i];
      }
    __syncthreads();
  }

  for (int r = me; r < rows; r += THREADS) {
    const int64_t row = (int64_t)r * row_length;
    const int last = first_ending_after(ends, documents, row + row_length) - 1;  // no document crosses rows
    out.row_ends[r] = last >= 0 && ends[last] > row ? ends[last] : row;
  }
  const int tiles = (row_length + CONV_TILE - 1) / CONV_TILE;
  for (int64_t i = me; i < (int64_t)rows * tiles; i += THREADS)
    out.tile_documents[i] = first_ending_after(ends, documents, i / tiles * row_length + i % tiles * CONV_TILE);
  if (me == 0)
    out.counts[0] = num_items, out.counts[1] = num_segments, out.counts[2] = num_cut, out.counts[3] = num_cut_documents;
}

template <class Word>
__global__ void zero_tails(char* data, int64_t token_bytes, int words, const int* row_ends, int rows, int row_length) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x, me = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    const int64_t first = row_ends[row], count = ((int64_t)(row + 1) * row_length - first) * words;
    for (int64_t i = me; i < count; i += step) ((Word*)(data + (first + i / words) * token_bytes))[i % words] = Word{};
  }
}

}  // namespace

void make_schedule(const int* starts, const int* ends, const int* offsets, const Plan& plan, const Schedule& out,
                   cudaStream_t stream) {
  schedule<<<1, THREADS, 0, stream>>>(starts, ends, offsets, plan, out);
}

void zero_padding(void* data, int64_t token_bytes, int64_t width_bytes, const int* row_ends, int rows, int row_length,
                  cudaStream_t stream) {
  const dim3 grid(max(1, 256 / rows), min(rows, 65535));
  if (((uintptr_t)data | token_bytes | width_bytes) % 16 == 0)
    zero_tails<uint4><<<grid, 256, 0, stream>>>((char*)data, token_bytes, width_bytes / 16, row_ends, rows, row_length);
  else
    zero_tails<uint16_t><<<grid, 256, 0, stream>>>((char*)data, token_bytes, width_bytes / 2, row_ends, rows, row_length);
}

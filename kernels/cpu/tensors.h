// Tensors as the kernels see them, the cut of a batch into work items, and the threads that take
// them.
//
//   slots       | document 0 | 1 | 2 | document 3              |     counted over all rows
//   segments    | 0          | 1     | 2                       |     documents joined until they
//                                                                    are worth a work item
//   items       segments x groups of channels, longest segment first; threads take the next one
//               as they become free
//
// The bounds of items depend on the layout alone, never on the number of threads, and every sum is
// made in the order of items: the same bits every time.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "vector.h"

namespace packmamba {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// (B, L, width), any strides but the last, which is 1. Slots are counted over the whole batch; null
// if the tensor is absent.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t row = 0;     // elements from a row to the next
  int64_t token = 0;   // elements from a slot to the next
  int64_t length = 1;  // L, slots of a row

  Rows() = default;
  explicit Rows(const Tensor& tensor)
      : data(static_cast<T*>(tensor.data_ptr())),
        row(tensor.stride(0)),
        token(tensor.stride(1)),
        length(tensor.size(1)) {}
  explicit Rows(const OptionalTensor& tensor) {
    if (tensor) *this = Rows(*tensor);
  }
  T* at(int64_t slot) const { return data + slot / length * row + slot % length * token; }
  explicit operator bool() const { return data != nullptr; }
};

// Rows are far apart, so the hardware does not foresee the next ones: `width` channels of `tokens`
// rows, to the caches. Inlined by force: GCC takes a function that only prefetches for one without
// effect and drops its calls.
template <class T>
[[gnu::always_inline]] inline void prefetch(const Rows<T>& rows, int64_t slot, int64_t tokens,
                                            int64_t channel, int64_t width) {
  if (!rows || tokens <= 0) return;
  const T* at = rows.at(slot) + channel;
  for (int64_t token = 0; token < tokens; ++token, at += rows.token)
    for (int64_t offset = 0; offset < width; offset += 64 / int64_t(sizeof(T)))
      __builtin_prefetch(at + offset, 0, 2);
}

// A share of the rows that a group's next tokens lie in, while one of its blocks of channels is
// worked on.
struct Ahead {
  int64_t first;  // slot
  int64_t tokens;
  int64_t channel;
  int64_t width;
  Ahead(int64_t slot, int64_t tokens, int64_t channel, int64_t width, int block, int blocks)
      : first(slot + tokens * block / blocks),
        tokens(slot + tokens * (block + 1) / blocks - first),
        channel(channel),
        width(width) {}
  template <class T>
  [[gnu::always_inline]] void prefetch(const Rows<T>& rows) const {
    packmamba::prefetch(rows, first, tokens, channel, width);
  }
};

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
T* pointer(const OptionalTensor& tensor) {
  return tensor ? pointer<T>(*tensor) : nullptr;
}

struct Documents {
  const int32_t* starts;  // (S,): slots of the first tokens
  const int32_t* ends;    // (S,): slots after the last tokens
  int64_t count;          // S
  int64_t slots;          // B L
  Documents(const Tensor& starts, const Tensor& ends, const Tensor& like)
      : starts(pointer<const int32_t>(starts)),
        ends(pointer<const int32_t>(ends)),
        count(starts.numel()),
        slots(like.size(0) * like.size(1)) {}
};

// A run of work along the slots. Its bounds depend on the layout alone, never on the number of
// threads, and so do all sums.
struct Segment {
  int64_t first, last;  // documents [first, last)
  int64_t document;     // the first
  int64_t tokens;
};

// Whole documents, joined until they are worth a work item.
inline std::vector<Segment> join_documents(const Documents& documents, int64_t worthwhile) {
  std::vector<Segment> segments;
  for (int64_t document = 0; document < documents.count; ++document) {
    if (segments.empty() || segments.back().tokens >= worthwhile)
      segments.push_back({document, document, document, 0});
    segments.back().last = document + 1;
    segments.back().tokens += documents.ends[document] - documents.starts[document];
  }
  return segments;
}

// Runs body(worker's scratch, item) for every item, in the given order as workers become free.
template <class Scratch, class Body>
void for_each_item(int64_t items, const Scratch& prototype, const Body& body) {
  const int64_t workers = std::min<int64_t>(items, torch::stable::get_num_threads());
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Scratch scratch = prototype;
      for (int64_t item; (item = next++) < items;)
        body(scratch, item);
    }
  });
}

// Segment numbers, longest first, so that no thread ends alone with a long one.
inline std::vector<int64_t> longest_first(const std::vector<Segment>& segments) {
  std::vector<int64_t> order(segments.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = int64_t(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return segments[a].tokens > segments[b].tokens; });
  return order;
}

// Of an output that no cache would keep until it is read, and that is always new memory.
constexpr int64_t kLargeBytes = 32 << 20;

// New memory comes page by page as it is written, 3 us each: 50 ms for 64 MiB in pages of 4 KiB, a
// fifth in pages of 2 MiB.
inline void ask_for_large_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes) / page * page;
  if (bytes >= kLargeBytes) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Before a contiguous output of `width` channels is written: zeros in its padding.
template <class T>
void begin_output(T* data, int64_t width, const Documents& documents) {
  if (data == nullptr) return;
  ask_for_large_pages(data, documents.slots * width * int64_t(sizeof(T)));
  for (int64_t document = 0; document <= documents.count; ++document) {
    const int64_t from = document == 0 ? 0 : documents.ends[document - 1];
    const int64_t to = document == documents.count ? documents.slots : documents.starts[document];
    if (to > from)
      std::memset(static_cast<void*>(data + from * width), 0, sizeof(T) * width * (to - from));
  }
}

// out[i] = sum over parts of partial[part][i], in the order of the parts.
template <class R>
void sum_parts(const R* partial, int64_t parts, int64_t size, int64_t stride, R* out) {
  if (out == nullptr) return;
  torch::stable::parallel_for(0, size, 4096, [&](int64_t begin, int64_t end) {
    std::fill(out + begin, out + end, R(0));
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t i = begin; i < end; ++i)
        out[i] += partial[part * stride + i];
  });
}

// The same for the real tokens of (slots, width), rounded to the storage type; padding is zero.
template <class T>
void sum_groups(const accumulate_t<T>* partial, int64_t parts, int64_t width,
                const Documents& documents, T* out) {
  using R = accumulate_t<T>;
  begin_output(out, width, documents);
  torch::stable::parallel_for(0, documents.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t document = begin; document < end; ++document) {
      for (int64_t i = documents.starts[document] * width; i < documents.ends[document] * width;
           i += kLanes<R>) {
        const int count = int(std::min<int64_t>(kLanes<R>, documents.ends[document] * width - i));
        Vec<R> sum{};
        for (int64_t part = 0; part < parts; ++part)
          sum += load(partial + part * documents.slots * width + i, count);
        store(out + i, sum, count);
      }
    }
  });
}

}  // namespace packmamba

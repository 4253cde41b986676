// Convolution on the host: how its work is divided.
//
// Depthwise convolutions and those of small groups are sums of vectors of channels. All others are
// matrix products of the segments that windows cover, see `conv_kernels.h`, with one kernel of
// packed columns. How sums are cut depends on sizes alone, so that results have the same bits with
// any number of threads.
#include "cpu/conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cpu/arrays.h"
#include "cpu/bf16_products.h"
#include "cpu/conv_depthwise_kernels.h"
#include "cpu/conv_grad_kernels.h"
#include "cpu/conv_kernels.h"
#include "cpu/isa.h"

namespace jaxops::conv::cpu {
namespace depthwise {
namespace {
JAXOPS_DEFINE_BEST_KERNELS();
}  // namespace
}  // namespace depthwise

namespace grad {
namespace {
JAXOPS_DEFINE_BEST_KERNELS();
}  // namespace
}  // namespace grad

namespace {

using im2col::kMaxDims;
using im2col::Window;
using jaxops::cpu::At;
using jaxops::cpu::Bf16Products;
using jaxops::cpu::CeilDiv;
using jaxops::cpu::FindBf16Products;
using jaxops::cpu::ParallelFor;
using jaxops::cpu::RunTasks;

JAXOPS_DEFINE_BEST_KERNELS();

// Multiply-adds of vectors in a task, which takes much longer than handing it to a thread.
constexpr int64_t kTaskVectors = 200'000;
// Tasks that keep the threads of a large machine busy, if sums have to be cut for that.
constexpr int64_t kManyTasks = 64;
// A task has several phases of its lines, which then are in a cache for all but the first:
// (32,64,56,56,128,1) bf16 with strides of 2 takes 1.33 ms for 2.32. This number of phases bounds
// the memory of many; a transposed convolution with strides of 16 (2,21,16,21,32,16) bf16 takes
// 2.35 ms, and 2.08 if its 256 phases are joined.
constexpr int64_t kMaxJoinedPhases = 64;
// Bytes of their packed kernels: (16,512,14,14,512,3) bf16 takes 17.1 ms if all are joined,
// and 15.7 with this limit.
constexpr int64_t kMaxJoinedBytes = 1024 * 1024;
constexpr int64_t kAlignment = 64;

// Memory that is aligned to a cache line and not initialised.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes)
      : data_(static_cast<std::byte*>(
            ::operator new(std::max<int64_t>(bytes, 1), std::align_val_t(kAlignment)))) {}
  void* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* data) const {
      ::operator delete(data, std::align_val_t(kAlignment));
    }
  };
  std::unique_ptr<std::byte, Delete> data_;
};

DType SumType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

int64_t Entries(const Window (&dims)[kMaxDims], int64_t Window::* size) {
  return dims[0].*size * dims[1].*size * dims[2].*size;
}

// Copies an array to the type that is summed.
Memory Widen(const void* array, DType dtype, int64_t size, const ParallelFor& parallel_for) {
  const DType wide = SumType(dtype);
  Memory memory(size * SizeOf(wide));
  constexpr int64_t kTaskEntries = 32 * 1024;
  RunTasks(CeilDiv(size, kTaskEntries), parallel_for, [&](int64_t task) {
    const int64_t begin = task * kTaskEntries;
    BestKernels().widen(dtype, At(array, begin, dtype), std::min(size - begin, kTaskEntries),
                        At(memory.get(), begin, wide));
  });
  return memory;
}

Axis ForwardAxis(const Window& window) {
  return {.size = window.in,
          .count = window.out,
          .taps = window.taps,
          .first = -window.low,
          .step = window.stride,
          .tap_step = window.dilation,
          .result_size = window.out,
          .kernel_taps = window.taps};
}

// Every stride-th entry of an image, from entry `begin` on, and the taps that reach these from
// cotangents: from the last one on, those that are whole strides apart.
Axis InputGradAxis(const Window& window, int64_t begin) {
  const int64_t stride = window.stride;
  Axis axis = {.size = window.out, .result_size = window.in, .kernel_taps = window.taps};
  axis.count = CeilDiv(window.in - begin, stride);
  axis.result_first = begin;
  axis.result_step = stride;
  const int64_t period = stride / std::gcd(stride, window.dilation);
  int64_t tap = 0;
  while (tap < std::min(period, window.taps) &&
         (begin + window.low - tap * window.dilation) % stride != 0) {
    ++tap;
  }
  const bool has_taps = tap < std::min(period, window.taps);
  axis.taps = has_taps ? (window.taps - 1 - tap) / period + 1 : 0;
  axis.kernel_first = tap + (axis.taps - 1) * period;
  axis.kernel_step = -period;
  axis.tap_step = window.dilation / std::gcd(stride, window.dilation);
  if (has_taps) axis.first = (begin + window.low - axis.kernel_first * window.dilation) / stride;
  return axis;
}

// A phase is the forward product, or an input gradient at the pixels of one remainder by the
// strides. This function calls f with the axes of every phase.
template <typename F>
void ForEachPhase(const Call& call, bool is_forward, F f) {
  const auto& [d0, d1, d2] = call.dims;
  if (is_forward) {
    const Axis axes[] = {ForwardAxis(d0), ForwardAxis(d1), ForwardAxis(d2)};
    return f(axes);
  }
  for (int64_t begin0 = 0; begin0 < std::min(d0.stride, d0.in); ++begin0) {
    for (int64_t begin1 = 0; begin1 < std::min(d1.stride, d1.in); ++begin1) {
      for (int64_t begin2 = 0; begin2 < std::min(d2.stride, d2.in); ++begin2) {
        const Axis axes[] = {InputGradAxis(d0, begin0), InputGradAxis(d1, begin1),
                             InputGradAxis(d2, begin2)};
        f(axes);
      }
    }
  }
}

// Whether groups are too small to be matrix products: their channels are lanes of vectors. Kernels
// for these copy all that lies between taps, so these must not be far apart.
bool AreGroupsSmall(const Call& call) {
  constexpr int64_t kMaxFan = 8;
  const auto is_near = [](const Window& window) {
    const int64_t most = 2 * window.in + 64;
    return window.stride <= most && window.dilation <= most / std::max<int64_t>(1, window.taps);
  };
  return std::max(call.channels, call.outputs) <= kMaxFan * call.groups && call.groups > 1 &&
         std::all_of(std::begin(call.dims), std::end(call.dims), is_near);
}

// --- depthwise -----------------------------------------------------------------------------------

// Channels in blocks of whole vectors, of which a task copies lines to a cache.
struct ChannelBlocks {
  int64_t count;
  int64_t vectors;  // of a block

  ChannelBlocks(int64_t channels, int64_t lanes, int64_t vector_bytes) {
    constexpr int64_t kRingBytes = 256 * 1024;
    const int64_t all = CeilDiv(channels, lanes);
    const int64_t most = std::max<int64_t>(1, kRingBytes / std::max<int64_t>(1, vector_bytes));
    vectors = CeilDiv(all, CeilDiv(all, most));
    count = CeilDiv(all, vectors);
  }
};

// Part [begin, end) of a phase's `count` lines or spans that goes with part [begin, end) of
// `whole`.
struct Part {
  int64_t begin, end;

  Part(int64_t task, int64_t per_task, int64_t whole, int64_t count)
      : begin(At(task * per_task, whole, count)), end(At((task + 1) * per_task, whole, count)) {}

 private:
  static int64_t At(int64_t at, int64_t whole, int64_t count) {
    return static_cast<int64_t>(static_cast<__int128>(std::min(at, whole)) * count / whole);
  }
};

void ConvolvePhases(const Call& call, const std::vector<depthwise::Product>& phases,
                    const ParallelFor& parallel_for) {
  if (phases.empty()) return;
  const depthwise::Kernels& kernels = depthwise::BestKernels();
  const int64_t lanes = kernels.vector_bytes / SizeOf(SumType(call.dtype));
  const int64_t channels = phases[0].channels;
  int64_t ring_bytes = 0;  // of a vector
  for (const depthwise::Product& phase : phases) {
    const auto& [a0, a1, a2] = phase.axes;
    const int64_t width = a2.count * a2.step * phase.fan;
    ring_bytes = std::max(ring_bytes, width * a0.taps * (a1.taps + 1) * kernels.vector_bytes);
  }
  const ChannelBlocks blocks(channels, lanes, ring_bytes);
  int64_t vectors = 0, space_bytes = 0, taps = 0, lines = 0;
  const auto count_lines = [](const depthwise::Product& phase) {
    return phase.axes[0].count * phase.axes[1].count;
  };
  for (const depthwise::Product& phase : phases) {
    const auto& [a0, a1, a2] = phase.axes;
    lines = std::max(lines, count_lines(phase));
    vectors += blocks.vectors * count_lines(phase) * a2.count *
               (phase.fan * a0.taps * a1.taps * a2.taps + 1);
    taps = std::max(taps, a1.taps);
    space_bytes = std::max(space_bytes, kernels.convolve_space(phase, blocks.vectors));
  }
  // A task copies the lines before its first one again.
  const int64_t per_task = std::clamp(kTaskVectors / CeilDiv(vectors, lines),
                                      std::min(lines, std::max<int64_t>(1, 4 * taps)), lines);
  const int64_t tasks = CeilDiv(lines, per_task);
  const int64_t images = call.images.size();
  RunTasks(images * blocks.count * tasks, parallel_for, [&](int64_t i) {
    const Memory space(space_bytes);
    for (const depthwise::Product& phase : phases) {
      const Part part(i % tasks, per_task, lines, count_lines(phase));
      if (part.begin == part.end) continue;
      const depthwise::Task task = {i / tasks / blocks.count,
                                    i / tasks % blocks.count * blocks.vectors * lanes,
                                    blocks.vectors, part.begin, part.end};
      kernels.convolve(phase, task, space.get());
    }
  });
}

void ConvolveDepthwise(const Call& call, bool is_forward, const ParallelFor& parallel_for) {
  depthwise::Product product = {};
  product.sources = call.images.data();
  product.results = call.results.data();
  const int64_t fan_in = call.channels / call.groups, fan_out = call.outputs / call.groups;
  product.channels = is_forward ? call.outputs : call.channels;
  product.fan = is_forward ? fan_in : fan_out;
  product.columns = is_forward ? fan_out : fan_in;
  product.dtype = call.dtype;
  product.finish = {call.result_dtype, call.activation, call.bias};
  product.kernel = call.kernel;
  product.tap_stride = fan_in * call.outputs;
  product.fan_stride = is_forward ? call.outputs : 1;
  product.column_stride = is_forward ? 1 : call.outputs;
  product.group_stride = fan_out;
  std::vector<depthwise::Product> phases;
  ForEachPhase(call, is_forward, [&](const Axis(&axes)[kMaxDims]) {
    std::copy_n(axes, kMaxDims, product.axes);
    if (axes[0].count * axes[1].count * axes[2].count == 0) return;
    if (std::ssize(phases) == kMaxJoinedPhases) {
      ConvolvePhases(call, phases, parallel_for);
      phases.clear();
    }
    phases.push_back(product);
  });
  ConvolvePhases(call, phases, parallel_for);
}

// How lines of all images, or their spans, are cut into sums.
struct Parts {
  int64_t count;
  int64_t size;  // of a part
};

// Parts of about the work of a task, but no more than threads of large machines need.
Parts CutSums(int64_t items, int64_t item_vectors, int64_t other_tasks) {
  const int64_t most = std::max<int64_t>(1, CeilDiv(kManyTasks, std::max<int64_t>(1, other_tasks)));
  const int64_t least = std::max<int64_t>(1, kTaskVectors / std::max<int64_t>(1, item_vectors));
  const int64_t per_part = std::max<int64_t>(1, std::max(CeilDiv(items, most), least));
  return {std::max<int64_t>(1, CeilDiv(items, per_part)), per_part};
}

void DepthwiseKernelGrad(const Call& call, const ParallelFor& parallel_for) {
  const depthwise::Kernels& kernels = depthwise::BestKernels();
  depthwise::GradProduct product = {};
  std::copy_n(call.dims, kMaxDims, product.dims);
  product.sources = call.images.data();
  product.cotangents = call.cotangents.data();
  product.channels = call.outputs;
  product.fan = call.channels / call.groups;
  product.columns = call.outputs / call.groups;
  product.dtype = call.dtype;
  const DType wide = SumType(call.dtype);
  const int64_t lanes = kernels.vector_bytes / SizeOf(wide);
  const auto& [d0, d1, d2] = call.dims;
  const int64_t width = d2.out * d2.stride * product.fan;
  const ChannelBlocks blocks(call.outputs, lanes,
                             width * d0.taps * (d1.taps + 1) * kernels.vector_bytes);
  const int64_t images = call.images.size();
  const int64_t lines = images * d0.out * d1.out;
  const auto [parts, per_part] =
      CutSums(lines, d2.out * product.fan * call.taps() * blocks.vectors, blocks.count);
  const int64_t size = call.taps() * product.fan * call.outputs;
  const Memory sums(parts * size * SizeOf(wide));
  RunTasks(blocks.count * parts, parallel_for, [&](int64_t i) {
    const int64_t part = i % parts, channel = i / parts * blocks.vectors * lanes;
    const depthwise::GradTask task = {channel, blocks.vectors, part * per_part,
                                      std::min(lines, (part + 1) * per_part)};
    const Memory space(kernels.grad_space(product, blocks.vectors));
    kernels.grad(product, task, space.get(), At(sums.get(), part * size + channel, wide),
                 call.outputs);
  });
  BestKernels().add_parts(wide, sums.get(), parts, size, 1, size, size, call.result_dtype,
                          call.results[0]);
}

// --- matrix products -----------------------------------------------------------------------------

// The columns of a group in blocks of nearly the same number of vectors.
struct Blocks {
  int64_t count;
  int64_t vectors;  // of all blocks

  Blocks(int64_t columns, int64_t lanes, int64_t max_vectors)
      : count(CeilDiv(CeilDiv(columns, lanes), max_vectors)), vectors(CeilDiv(columns, lanes)) {}

  int64_t First(int64_t block) const { return block * vectors / count; }
  int Vectors(int64_t block) const { return static_cast<int>(First(block + 1) - First(block)); }
};

// Pixels of a line that are computed at a time: several tiles, if a cache holds what they read.
int64_t SpanOf(const Product& product) {
  constexpr int64_t kMaxPixels = 256, kMinPixels = 48, kBytes = 128 * 1024;
  const Axis& axis = product.axes[2];
  const int64_t entries =
      product.fan *
      std::max<int64_t>(1, product.is_merged ? std::min(axis.step, axis.taps) : axis.taps);
  const int64_t pixel_bytes =
      product.axes[0].taps * product.axes[1].taps * entries * SizeOf(product.dtype);
  const int64_t most =
      std::clamp(kBytes / std::max<int64_t>(1, pixel_bytes), kMinPixels, kMaxPixels);
  if (axis.count <= most) return axis.count;
  return CeilDiv(CeilDiv(axis.count, CeilDiv(axis.count, most)), kMinPixels) * kMinPixels;
}

struct Phase {
  Product product;
  Memory packed;
  std::vector<Panel> panels;
};

int64_t PackedBytes(const Call& call, const Blocks& blocks, int64_t lanes, const Product& phase) {
  return phase.segments() * phase.packed_rows() * call.groups * blocks.vectors * lanes *
         SizeOf(phase.dtype);
}

void MultiplyPhases(const Call& call, const Blocks& blocks, int64_t lanes,
                    std::vector<Phase>& phases, const ParallelFor& parallel_for) {
  if (phases.empty()) return;
  const Kernels& kernels = BestKernels();
  const int64_t panels = call.groups * blocks.count;
  RunTasks(std::ssize(phases) * panels, parallel_for, [&](int64_t i) {
    Phase& phase = phases[i / panels];
    const int64_t panel = i % panels;
    const int64_t group = panel / blocks.count, block = panel % blocks.count;
    const int64_t first = blocks.First(block) * lanes;
    const int64_t rows = phase.product.segments() * phase.product.packed_rows();
    const int64_t offset = (group * blocks.vectors * lanes + first) * rows;
    phase.panels[panel] = {group, first, blocks.Vectors(block), true,
                           At(phase.packed.get(), offset, phase.product.dtype)};
    kernels.pack(phase.product, phase.panels[panel]);
  });
  // A task has all panels if a cache holds them, so that no two threads write neighbouring columns
  // of the same results: (1,64,56,56,256,1) bfloat16 takes 0.35 in place of 0.40 ms. Otherwise it
  // has one. There are no more tasks than threads need to end at about the same time, as each reads
  // all of its panels and copies lines that the one before has.
  constexpr int64_t kCacheBytes = 512 * 1024, kTasksPerThread = 8;
  const auto count_vectors = [](const Product& phase) {
    return phase.spans() * phase.span * (phase.segments() * phase.segment() + 1);
  };
  int64_t in_task = panels, vectors = 0, space_bytes = 0;
  const Product* largest = &phases[0].product;
  for (const Phase& phase : phases) {
    if (PackedBytes(call, blocks, lanes, phase.product) > kCacheBytes) in_task = 1;
    if (count_vectors(phase.product) > count_vectors(*largest)) largest = &phase.product;
    vectors += count_vectors(phase.product);
    space_bytes = std::max(space_bytes, kernels.multiply_space(phase.product));
  }
  const int64_t spans = largest->spans();
  const int64_t span_vectors =
      CeilDiv(vectors, spans) * CeilDiv(blocks.vectors * call.groups * in_task, panels);
  int64_t per_task =
      std::max({int64_t{1}, spans * panels / (in_task * kTasksPerThread * parallel_for.threads),
                kTaskVectors / span_vectors});
  // Whole blocks, if every thread has a few.
  const int64_t fair = CeilDiv(spans * panels, 2 * in_task * parallel_for.threads);
  const int64_t in_blocks = CeilDiv(per_task, largest->lines) * largest->lines;
  per_task = std::max(per_task, std::min(in_blocks, fair));
  const int64_t tasks = CeilDiv(spans, per_task);
  RunTasks(panels / in_task * tasks, parallel_for, [&](int64_t i) {
    const Memory space(space_bytes);
    for (const Phase& phase : phases) {
      const Part part(i % tasks, per_task, spans, phase.product.spans());
      if (part.begin == part.end) continue;
      kernels.multiply(phase.product, &phase.panels[i / tasks * in_task], in_task, part.begin,
                       part.end, space.get());
    }
  });
}

void Multiply(const Call& call, bool is_forward, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  const int64_t fan_in = call.channels / call.groups, fan_out = call.outputs / call.groups;
  const Bf16Products bf16_products = FindBf16Products();
  const bool has_pairs = call.dtype == DType::kBF16 && bf16_products != Bf16Products::kFloat32;
  Product product = {};
  product.has_matrices = has_pairs && bf16_products == Bf16Products::kMatrices;
  product.images = call.images.size();
  product.results = call.results.data();
  product.source_channels = is_forward ? call.channels : call.outputs;
  product.result_channels = is_forward ? call.outputs : call.channels;
  product.fan = is_forward ? fan_in : fan_out;
  product.columns = is_forward ? fan_out : fan_in;
  product.max_vectors = product.has_matrices ? kMatrixVectors : kernels.max_vectors;
  product.source_dtype = call.dtype;
  product.dtype = has_pairs ? DType::kBF16 : SumType(call.dtype);
  product.finish = {call.result_dtype, call.activation, call.bias};
  product.tap_stride = fan_in * call.outputs;
  product.fan_stride = is_forward ? call.outputs : 1;
  product.column_stride = is_forward ? 1 : call.outputs;
  product.group_stride = fan_out;
  product.sources = call.images.data();
  Memory wide;
  product.kernel = call.kernel;
  if (product.dtype != call.dtype) {
    wide = Widen(call.kernel, call.dtype, call.taps() * product.tap_stride, parallel_for);
    product.kernel = wide.get();
  }
  const int64_t lanes = kernels.vector_bytes / SizeOf(SumType(call.dtype));
  const Blocks blocks(product.columns, lanes, product.max_vectors);
  const int64_t panels = call.groups * blocks.count;
  std::vector<Phase> phases;
  int64_t joined_bytes = 0;
  const auto run = [&] {
    MultiplyPhases(call, blocks, lanes, phases, parallel_for);
    phases.clear();
    joined_bytes = 0;
  };
  ForEachPhase(call, is_forward, [&](const Axis(&axes)[kMaxDims]) {
    std::copy_n(axes, kMaxDims, product.axes);
    product.is_merged = axes[2].tap_step == 1;
    product.span = std::max<int64_t>(1, SpanOf(product));
    if (product.spans() == 0 || panels == 0) return;
    product.lines = kernels.block_lines(product);
    const int64_t bytes = PackedBytes(call, blocks, lanes, product);
    if (std::ssize(phases) == kMaxJoinedPhases || joined_bytes + bytes > kMaxJoinedBytes) run();
    phases.push_back({product, Memory(bytes), std::vector<Panel>(panels)});
    joined_bytes += bytes;
  });
  run();
}

void MultiplyGrad(const Call& call, const ParallelFor& parallel_for) {
  const Kernels& kernels = BestKernels();
  const auto& [d0, d1, d2] = call.dims;
  const DType wide = SumType(call.dtype);
  const int64_t fan_in = call.channels / call.groups, fan_out = call.outputs / call.groups;
  const int64_t lanes = kernels.vector_bytes / SizeOf(wide);
  const int64_t padded = CeilDiv(fan_out, lanes) * lanes;
  grad::Product product = {};
  std::copy_n(call.dims, kMaxDims, product.dims);
  product.images = call.images.size();
  product.sources = call.images.data();
  product.cotangents = call.cotangents.data();
  product.source_channels = call.channels;
  product.cotangent_channels = call.outputs;
  product.fan_in = fan_in;
  product.dtype = call.dtype;
  product.copies_sources = call.dtype != wide;
  product.copies_cotangents = call.dtype != wide || fan_out != padded;
  // Rows of several taps waste none of a tile of rows.
  constexpr int64_t kMaxMerged = 24;
  product.is_merged = d2.dilation == 1 && call.groups == 1 && fan_in < kMaxMerged;
  // Long lines are cut so that a cache holds the operands of a span.
  constexpr int64_t kMaxSpan = 256;
  product.span = CeilDiv(d2.out, CeilDiv(d2.out, kMaxSpan));

  const int64_t rows = (product.is_merged ? d2.taps : 1) * fan_in;
  if (call.dtype == DType::kBF16) {
    const Bf16Products bf16_products = FindBf16Products();
    // Tasks for matrices copy the lines of all taps, however few they have.
    constexpr int64_t kMaxTapLines = 64;
    const bool has_matrices = bf16_products == Bf16Products::kMatrices;
    product.has_matrices = has_matrices && d1.taps <= kMaxTapLines;
    product.has_pairs = bf16_products == Bf16Products::kPairs;
  }
  const int64_t segments = product.segments();
  // Rows of a task, and bytes of sums that a cache holds: with all segments, a task reads its spans
  // once. Its copies for matrices are shared by many columns; processors that have matrices have
  // caches of 2 MiB.
  const int64_t max_rows = product.has_matrices ? 64 : 96;
  const int64_t sum_bytes = (product.has_matrices ? 512 : 256) * 1024;
  const int64_t max_vectors = product.has_matrices ? (segments == 1 ? 16 : 8) : kernels.max_vectors;
  const Blocks blocks(fan_out, lanes, max_vectors);
  const int64_t row_blocks = CeilDiv(rows, max_rows);
  const int64_t tiles = call.groups * blocks.count * row_blocks;
  const auto rounded = [&](int64_t count, int64_t whole) {
    return product.has_matrices ? CeilDiv(count, whole) * whole : count;
  };
  const int64_t tile_vectors = rounded(CeilDiv(rows, row_blocks), 2 * kMatrixRows) *
                               rounded(CeilDiv(blocks.vectors, blocks.count), kMatrixVectors);
  const int64_t max_segments =
      std::max<int64_t>(1, sum_bytes / std::max<int64_t>(1, tile_vectors * kernels.vector_bytes));
  const int64_t passes = CeilDiv(segments, max_segments);
  // A part sums over enough windows that writing its sums takes little of its time. Matrices with
  // 1024 windows took 5.4 ms where 4096 take 4.1 (docs/conv2d.md).
  const int64_t min_windows = product.has_matrices ? 4096 : 1024;
  const int64_t spans = product.images * d0.out * d1.out * product.spans();
  const int64_t pass_vectors = product.span * tile_vectors * CeilDiv(segments, passes);
  const auto [parts, per_part] = CutSums(
      spans, std::min(pass_vectors, kTaskVectors * product.span / min_windows), tiles * passes);
  // The segments of a part become more tasks if there is enough work, which has no effect on bits:
  // as many as threads need, since each of them reads its spans again.
  constexpr int64_t kTasksPerThread = 4;
  const int64_t tasks = std::min(kManyTasks, kTasksPerThread * parallel_for.threads);
  const int64_t all_vectors = spans * product.span * tile_vectors * segments;
  const int64_t splits =
      std::clamp(std::min(CeilDiv(tasks, tiles * parts), all_vectors / (kTaskVectors * parts)),
                 passes, std::max(passes, segments));
  const int64_t columns = call.groups * padded;
  const int64_t size = segments * rows * columns;
  const Memory sums(parts * size * SizeOf(wide));
  RunTasks(parts * tiles * splits, parallel_for, [&](int64_t i) {
    const int64_t split = i % splits;
    int64_t rest = i / splits;
    const int64_t block = rest % blocks.count;
    rest /= blocks.count;
    const int64_t row_block = rest % row_blocks;
    rest /= row_blocks;
    const int64_t group = rest % call.groups;
    const int64_t part = rest / call.groups;
    grad::Task task = {};
    task.segment_begin = split * segments / splits;
    task.segment_end = (split + 1) * segments / splits;
    task.channel = group * fan_in;
    const int64_t output = blocks.First(block) * lanes;
    task.output = group * fan_out + output;
    task.vectors = blocks.Vectors(block);
    task.outputs = std::min(fan_out - output, task.vectors * lanes);
    task.row_begin = row_block * rows / row_blocks;
    task.row_end = (row_block + 1) * rows / row_blocks;
    task.span_begin = part * per_part;
    task.span_end = std::min(spans, (part + 1) * per_part);
    const Memory space(grad::BestKernels().space(product, task));
    const int64_t row = (part * segments + task.segment_begin) * rows + task.row_begin;
    const int64_t at = row * columns + group * padded + output;
    grad::BestKernels().sum(product, task, space.get(), At(sums.get(), at, wide), rows * columns,
                            columns);
  });
  // Rows of the kernel, in each of which groups are filled up.
  const int64_t all_rows = segments * rows * call.groups;
  constexpr int64_t kTaskEntries = 32 * 1024;
  const int64_t per_task = std::max<int64_t>(1, kTaskEntries / (padded * parts));
  RunTasks(CeilDiv(all_rows, per_task), parallel_for, [&](int64_t i) {
    const int64_t begin = i * per_task, end = std::min(all_rows, begin + per_task);
    kernels.add_parts(wide, At(sums.get(), begin * padded, wide), parts, size, end - begin, fan_out,
                      padded, call.result_dtype,
                      At(call.results[0], begin * fan_out, call.result_dtype));
  });
}

// Runs calls one after the other, or several at a time if there are enough for that.
template <typename F>
void ForEachCall(const Calls& calls, const ParallelFor& parallel_for, F run) {
  if (static_cast<int64_t>(calls.size()) < kManyTasks) {
    for (const Call& call : calls) run(call, parallel_for);
    return;
  }
  const auto run_all = [](int64_t count, const std::function<void(int64_t)>& task) {
    for (int64_t i = 0; i < count; ++i) task(i);
  };
  const ParallelFor serial = {1, run_all};
  parallel_for(calls.size(), [&](int64_t i) { run(calls[i], serial); });
}

// Gradients of a convolution without results are zero, which has the same bits in every dtype.
// Returns whether the call, whose results have this size, is one of these.
bool WriteSumsOverNothing(const Call& call, int64_t size) {
  const auto& [d0, d1, d2] = call.dims;
  if (d0.out * d1.out * d2.out > 0) return false;
  for (void* result : call.results) std::memset(result, 0, size * SizeOf(call.result_dtype));
  return true;
}

// Joins the lines of an image whose windows are entries. Small groups keep their lines, which are
// cut into tasks.
Call Flattened(Call call) {
  const auto is_entry = [](const Window& window) {
    return window.taps == 1 && window.stride == 1 && window.low == 0 && window.in == window.out;
  };
  if (std::all_of(std::begin(call.dims), std::end(call.dims), is_entry) && !AreGroupsSmall(call)) {
    const int64_t pixels = Entries(call.dims, &Window::in);
    call.dims[0].in = call.dims[0].out = call.dims[1].in = call.dims[1].out = 1;
    call.dims[2].in = call.dims[2].out = pixels;
  }
  return call;
}

void Convolve(const Calls& calls, bool is_forward, const ParallelFor& parallel_for) {
  ForEachCall(calls, parallel_for, [&](const Call& original, const ParallelFor& threads) {
    const Call call = Flattened(original);
    const auto& [d0, d1, d2] = call.dims;
    if (!is_forward && WriteSumsOverNothing(call, d0.in * d1.in * d2.in * call.channels)) return;
    if (AreGroupsSmall(call)) {
      ConvolveDepthwise(call, is_forward, threads);
    } else {
      Multiply(call, is_forward, threads);
    }
  });
}

}  // namespace

void RunForward(const Calls& calls, const ParallelFor& parallel_for) {
  Convolve(calls, /*is_forward=*/true, parallel_for);
}

void RunInputGrad(const Calls& calls, const ParallelFor& parallel_for) {
  Convolve(calls, /*is_forward=*/false, parallel_for);
}

void RunKernelGrad(const Calls& calls, const ParallelFor& parallel_for) {
  ForEachCall(calls, parallel_for, [&](const Call& original, const ParallelFor& threads) {
    const Call call = Flattened(original);
    const int64_t size = call.taps() * (call.channels / call.groups) * call.outputs;
    if (size == 0 || WriteSumsOverNothing(call, size)) return;
    if (AreGroupsSmall(call)) {
      DepthwiseKernelGrad(call, threads);
    } else {
      MultiplyGrad(call, threads);
    }
  });
}

}  // namespace jaxops::conv::cpu

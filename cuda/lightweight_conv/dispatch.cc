// This file chooses the kernel family of a lightweight convolution. docs/lightweight_conv.md has
// the table with the condition of each row.
#include "cuda/common/dispatch.h"

#include <algorithm>
#include <array>
#include <string>

#include "common/lightweight_conv_choice.h"
#include "cuda/common/refusal.h"
#include "cuda/lightweight_conv/calls.h"
#include "cuda/lightweight_conv/families.h"
#include "cuda/lightweight_conv/launch.h"
#include "cuda/lightweight_conv/packed.h"

namespace jaxops::lightweight_conv::cuda {
namespace {

using jaxops::cuda::Always;
using jaxops::cuda::Family;
using jaxops::cuda::Table;

bool PrefersMma(const Forward& call, const Device&) { return call.geometry.taps > kShortTaps; }

bool PrefersMmaOfSegments(const Gradients& gradients, const Device&) {
  return gradients.call.geometry.taps > kShortTaps;
}

// Tiles of float32 have few steps of rows of up to 64: gradients of (128,1024,64,16,15) f32 NCT
// took 62.5 us where nct/window took 46.7, of 31 taps 72.8 and 61.7, and 15 taps of 32 steps 97.3
// where nct/rows took 54.4; but 31 taps of 32 steps took 94.9 and nct/window 113, 15 taps of 96
// steps 50.9 and 59.5, and bf16 26.0 and 46.5. Other sizes and NTC were not measured.
bool PrefersMma(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const bool leaves_tiles_empty = g.data_format == DataFormat::kNCT && call.dtype == DType::kF32 &&
                                  g.time >= 32 && g.time <= 64 && g.taps <= (g.time > 32 ? 32 : 16);
  return g.taps > kShortTaps && !leaves_tiles_empty;
}

int64_t CountBytes(const Geometry& g, DType dtype, int64_t batch) {
  return batch * g.channels * g.time * SizeOf(dtype);
}

// Latency bounds calls up to 1 MiB of x. The limit is higher for rows that are not whole vectors,
// which other kernels than nct/rows and nct/segments would read element by element. 3.9 MiB
// of (2,1024,1001,1024,7) bf16 took 24.4 us, nct/segments 8.7.
constexpr int64_t kSmallBytes = 1 << 20;

bool IsSmallNct(const Geometry& g, DType dtype, int64_t batch) {
  const int64_t limit = RowsAligned(g.time, dtype, 16) ? 1 : g.dilation == 1 ? 2 : 8;
  return CountBytes(g, dtype, batch) <= limit * kSmallBytes;
}

bool PrefersStepsNct(const Forward& call, const Device&) {
  return IsSmallNct(call.geometry, call.dtype, call.batch.size());
}

// Blocks of nct/causal add the sums of few sequences often: the gradients of 8 examples of
// (8,1024,128,1024,4) f32 took 32.7 us where nct/window took 30.2, those of 16 examples of
// (8,1024,64,1024,4) bf16 19.2 and 34.9. The smallest calls wait for these sums: gradients of
// (2,64,64,8,4) f32 took 3.7 us where nct/steps took 2.5, those of (8,256,128,256,4) bf16 2.7
// and 3.6. Those of (1,1024,256,16,7) bf16 took 7.1, nct/steps 10.6 and nct/window 5.4.
bool PrefersCausal(const Gradients& gradients, const Device&) {
  constexpr int64_t kSmallestBytes = 1 << 15;
  const Backward& call = gradients.call;
  const int64_t row_bytes = call.geometry.time * SizeOf(call.dtype);
  const int64_t entries = call.kept.size() * call.summed.size();
  if (CountBytes(call.geometry, call.dtype, entries) <= kSmallestBytes) return false;
  return call.kept.size() == 1 || call.summed.size() >= 16 || row_bytes < 16 * kWarp;
}

// A block's few warps are enough for rows up to this length, because splits share batch entries but
// never a row.
constexpr int64_t kMaxStepTime = 2048;

bool PrefersStepsNct(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  return call.geometry.time <= kMaxStepTime &&
         IsSmallNct(call.geometry, call.dtype, call.kept.size() * call.summed.size());
}

// The condition holds for calls of any size, because other kernels need a second pass for the input
// gradient.
bool PrefersDilatedStepsNct(const Gradients& gradients, const Device&) {
  const Geometry& g = gradients.call.geometry;
  return g.time <= kMaxStepTime && g.dilation > 1;
}

// Tensor cores compute tiles of many steps, most of them beyond the ends of shorter rows.
constexpr int64_t kMinMmaTime = 32;

// Kernels of single channels compute 256 steps at a time: at least three quarters of them are to be
// steps of a sequence. 192 steps took 29.4 us where other kernels took 31.7, 128 took 43.8
// and 25.7, for 2^23 elements and 15 taps in bf16 NCT.
bool FillsParts(const Geometry& g) {
  constexpr int64_t kPart = 256;
  return 4 * g.time >= 3 * kPart * CeilDiv(g.time, kPart);
}

// The kernels of NTC transpose their tiles: 46.3 us for 15 taps of (8,2048,1024) bf16, and 46.2 for
// 31. ntc/long had taken 44 and 74 before, of which the limit of 20 is an estimate.
bool PrefersMmaChannels(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  return g.taps > (g.data_format == DataFormat::kNCT ? kShortTaps : 20) && FillsParts(g);
}

// A block adds up diagonals for each tile of a sequence: 83.4 us for 192 steps of 31 taps in NCT,
// nct/window 59.9, which computes both gradients in one pass. The limits of taps are estimated.
bool PrefersMmaChannels(const Gradients& gradients, const Device&) {
  const Geometry& g = gradients.call.geometry;
  return g.taps > (g.data_format == DataFormat::kNCT ? 16 : 32) && g.time >= 512 && FillsParts(g);
}

// RowVectors is the number of vectors of a row, and of the threads that kernels of longer rows have
// for it: powers of two from kNctMinRowThreads to kNctThreads.
struct RowVectors {
  int64_t count, threads;

  RowVectors(const Geometry& g, DType dtype) : count(CeilDiv(g.time * SizeOf(dtype), 16)) {
    threads = kNctMinRowThreads;
    while (threads < count && threads < kNctThreads) threads *= 2;
    threads *= CeilDiv(count, threads);
  }
};

// PrefersMmaOrSteps says whether tensor cores or, for latency, nct/steps run a call that nct/rows
// can run. Tensor cores took 27 us where nct/rows took 40 for (512,512,64,8,15) bf16.
template <typename Call>
bool PrefersMmaOrSteps(const Call& call, const Geometry& g, int64_t bytes, const Device& device) {
  if (g.taps <= kShortTaps) return bytes <= kSmallBytes;
  return (g.time >= kMinMmaTime && PrefersMma(call, device) && CanRunMma(call, device)) ||
         (PrefersMmaChannels(call, device) && CanRunMmaChannels(call, device));
}

// Odd rows of at most 4 taps were measured up to 1001 steps, those of more taps than kManyOddTaps
// only below this number of vectors: nct/rows took 35 us where nct/segments took 47 for
// (32,512,1001,512,4) bf16. With 5, 7 and 10 taps it takes 17.4 to 35.0 us for 2^23 elements in
// rows of 131 to 1001 steps, other kernels 27.8 to 60.7, and their gradients 25.1 to 89.0 and 50.5
// to 133, but 55.1 and 53.8 for 1001 steps of 10 taps in bf16. 2047 steps of 7 taps in bf16 took
// 23.4 us, other kernels 20.6, those of 10 taps 31.9 and 42.9. Two sequences give too few threads,
// 11.6 and 8.7 us for (2,1024,1001,1024,7) bf16, but (4,512,515,512,9) f32 took 6.3 and 8.9.
// Float64 of 7 taps took 37.4 and 22.2.
constexpr int64_t kManyOddVectors = 16;
constexpr int64_t kManyOddTaps = 10;
constexpr int64_t kManyOddEntries = 8;

bool PrefersRows(const Forward& call, const Device& device) {
  const Geometry& g = call.geometry;
  const int64_t bytes = CountBytes(g, call.dtype, call.batch.size());
  if (PrefersMmaOrSteps(call, g, bytes, device)) return false;
  const RowVectors vectors(g, call.dtype);
  if (!RowsAligned(g.time, call.dtype, 16)) {
    const int64_t max_time = g.taps > kShortTaps ? 2048 : 1024;
    const bool was_measured = g.taps <= kManyOddTaps && g.time <= max_time &&
                              call.dtype != DType::kF64 &&
                              (g.taps > kShortTaps || call.batch.size() >= kManyOddEntries);
    return g.taps <= 4 || vectors.count < kManyOddVectors || was_measured;
  }
  // 52 and 63 us for (64,512,512,512,15) f32.
  if (g.taps > kShortTaps) return true;
  // 37 and 38 us for 64 vectors of 4 taps in f32, 42 and 48 of 7 taps, and 39 and 49 for 40 vectors
  // of 4 taps; 29 and 27 us for 32 vectors of 4 taps in bf16.
  return vectors.count < (g.taps > 4 || vectors.count < vectors.threads ? 128 : 32);
}

bool PrefersRows(const Gradients& gradients, const Device& device) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  const int64_t bytes = CountBytes(g, call.dtype, call.kept.size() * call.summed.size());
  if (PrefersMmaOrSteps(gradients, g, bytes, device)) return false;
  const RowVectors vectors(g, call.dtype);
  // The threads of a block share channels, and have different sequences: a few leave some idle.
  constexpr int64_t kThreads = 256;
  if (call.summed.size() * std::max<int64_t>(kWarp, vectors.count) < kThreads) return false;
  if (!RowsAligned(g.time, call.dtype, 16)) {
    // nct/window was faster for 9 vectors of 15 taps in f32: 246 us, nct/rows 291.
    const bool is_f64 = call.dtype == DType::kF64;
    return g.taps <= (is_f64 ? 4 : kManyOddTaps) ||
           vectors.count < (is_f64 && g.taps <= kShortTaps ? kManyOddVectors : 8);
  }
  // 77 and 82 us for 20 vectors of 4 taps in f32, whose rows have 32 threads elsewhere; 75 and 69
  // for 24 vectors.
  return 8 * vectors.count <= 5 * vectors.threads;
}

bool IsShortUnaligned(const Geometry& g, DType dtype) {
  return g.dilation == 1 && g.taps <= kShortTaps && !RowsAligned(g.time, dtype, 16);
}

bool PrefersSegments(const Forward& call, const Device&) {
  const Geometry& g = call.geometry;
  // A vector of wide elements is hardly larger than the reach of its taps, so a single read is
  // better.
  const bool is_wide = g.dilation == 1 && g.taps <= 4 && SizeOf(call.dtype) >= 4 && g.time >= 1024;
  return is_wide || IsShortUnaligned(g, call.dtype) ||
         (g.dilation > 1 && nct::CountSegmentSteps(g, call.dtype) <= 3 * g.time);
}

bool PrefersSegments(const Gradients& gradients, const Device&) {
  const Backward& call = gradients.call;
  const Geometry& g = call.geometry;
  return IsShortUnaligned(g, call.dtype) ||
         (g.dilation > 1 && nct::CountSegmentSteps(g, call.dtype) <= 6 * g.time);
}

int64_t CountElements(const Forward& call) {
  const Geometry& g = call.geometry;
  return call.batch.size() * g.time * g.channels;
}

// Latency bounds small calls. With 4 taps ntc/steps takes 1.2 us in bf16 and ntc/window 1.7 for
// 2^16 elements, 1.8 and 1.9 for 2^18, 2.6 and 1.9 for 2^19; in float32 1.3 and 1.6, 2.4
// and 1.9, 3.9 and 2.1.
bool PrefersWindowNtc(const Forward& call, const Device& device) {
  constexpr int64_t kMaxSmall = 1 << 17;
  return CountElements(call) > kMaxSmall || !ntc::CanRunSteps(call, device);
}

// Short sequences end before ntc/short has its loads in flight: in vectors of four channels, which
// ntc/window runs now, ntc/steps took 22.1 us where that took 30.4 for (1024,1024,8,16,3) bf16, but
// 26.1 and 18.9 for 16 steps of 4 taps.
bool PrefersStepsNtc(const Forward& call, const Device&) {
  return call.geometry.time <= 8 || CountElements(call) <= int64_t{1} << 19;
}

// Times are those of an H200; rows without a time were not measured. All families but those of mma
// compute one data format, and the last row of each format computes every call.
constexpr Family<Forward> kForwardFamilies[] = {
    // Instructions bound other kernels of short filters: 17.1 -> 10.6 us for (128,1024,64,16,3)
    // bf16, 13.6 -> 10.8 for (2,1024,4096,1024,4), 79.2 -> 70.2 for (4,2048,8192,2048,4), and 20.2
    // -> 18.0 for (16,1024,512,1024,4) f32; 18.5 -> 10.6 for (128,1024,64,16,7) bf16.
    {"nct/causal", nct::CanRunCausal, Always, nct::LaunchCausal},
    // Neighbouring threads have neighbouring memory, whatever the length of rows, and a thread has
    // several steps of odd rows, too: 574 -> 29.3 us for (4096,512,8,512,4) bf16, 74.5 -> 40.4 for
    // (254,512,129,512,4) f32.
    {"nct/rows", nct::CanRunRows, PrefersRows, nct::LaunchRows},
    // Multiply-adds bound long filters, but not on tensor cores: 53.9 -> 20.1 us for
    // (8,1024,2048,16,31) bf16 NTC, 61.5 -> 23.8 in NCT.
    {"mma", CanRunMma, PrefersMma, LaunchMma},
    // The reason is the same, where fewer channels share a filter, or filters are longer.
    {"mma/channels", CanRunMmaChannels, PrefersMmaChannels, LaunchMmaChannels},
    // Latency bounds a small call: a thread computes single steps, and all its loads are in flight.
    {"nct/steps", nct::CanRunSteps, PrefersStepsNct, nct::LaunchSteps},
    // Shared memory holds a tile of rows as in global memory, so that taps may read it at any
    // distance.
    {"nct/segments", nct::CanRunSegments, PrefersSegments, nct::LaunchSegments},
    // Memory bounds short filters: the window is in registers, and each result is written once.
    {"nct/window", nct::CanRunWindow, Always, nct::LaunchWindow},
    // Multiply-adds read their inputs from shared memory.
    {"nct/long", nct::CanRunLong, Always, nct::LaunchLong},
    // Every tap is read through the cache.
    {"nct/dilated", nct::CanRunDilated, Always, nct::LaunchDilated},
    // All loads of a window are in flight at once, also where a sequence ends early:
    // (4,2048,8192,2048,4) bf16 takes 65.3 us, and took 72.0 in ntc/short.
    {"ntc/window", ntc::CanRunWindow, PrefersWindowNtc, ntc::LaunchWindow},
    // Latency bounds a small call.
    {"ntc/steps", ntc::CanRunSteps, PrefersStepsNtc, ntc::LaunchSteps},
    // Memory bounds short filters: the window is in registers, and the next rows are in flight to
    // shared memory. Pairs of channels of (512,33,1026,1026,4) bf16 take 44.6 us, 66.8 in
    // ntc/scalar.
    {"ntc/short", ntc::CanRunShort, Always, ntc::LaunchShort},
    // The window and the next rows are in registers, for any number of channels.
    {"ntc/scalar", ntc::CanRunScalar, Always, ntc::LaunchScalar},
    // Multiply-adds read their inputs from shared memory.
    {"ntc/long", ntc::CanRunLong, Always, ntc::LaunchLong},
};
const Table<Forward> kForward("lightweight_conv", "forward", kForwardFamilies);

// This table computes parts of other calls: input gradients that the kernels of kernel gradients do
// not compute, and calls without their state. The table has a name of its own, so that forcing a
// family for the whole does not force one here.
const Table<Forward> kPart("lightweight_conv_part", "forward", kForwardFamilies);

Forward WithoutState(Forward call) {
  call.state = nullptr;
  call.slots = nullptr;
  return call;
}

// A state reaches only the first steps of its sequence or segment. The kernels of calls without
// states compute all steps, and others the first ones again.
bool CanRunHeads(const Forward& call, const Device& device) {
  if (call.slots != nullptr) return CanRunStateSteps(call);
  return call.state != nullptr && CanRunPacked(call, device);
}

// Kernels of short filters read states on their way, but for NCT that nct/causal cannot run.
// Without segments others were up to 15 % faster, before ntc/window ran 16-bit calls with states:
// that is worth a second launch if x is large. So are segments with states of their own, if tensor
// cores compute the other steps: ragged_conv of (4096,1024,16,31) bf16 with 16 segments takes 30.1
// us, and 144 by "packed". The limit of 16 times the padding is estimated, because "packed" was not
// timed with fewer than 4096 steps.
bool PrefersHeads(const Forward& call, const Device& device) {
  const Geometry& g = call.geometry;
  if (call.slots != nullptr) {
    const Forward stateless = WithoutState(call);
    return g.time >= 16 * g.padding && PrefersMma(stateless, device) &&
           CanRunMma(stateless, device);
  }
  const int64_t bytes = CountBytes(g, call.dtype, call.batch.size());
  const bool reads_state =
      ntc::CanRunShortOfSegments(call, device) || nct::CanRunCausalOfSegments(call, device);
  return g.time > g.padding &&
         (g.taps > kShortTaps ||
          (call.starts == nullptr && (!reads_state || bytes >= int64_t{32} << 20)));
}

cudaError_t LaunchHeads(cudaStream_t stream, const Forward& call, const Device&);

// Calls with segments or states have tables of their own. The last row runs all of them.
constexpr Family<Forward> kPackedForwardFamilies[] = {
    // A second launch for a few steps lets all others have the kernels of calls without states.
    {"heads", CanRunHeads, PrefersHeads, LaunchHeads},
    // Tensor cores multiply long filters, as without segments.
    {"mma", CanRunMma, PrefersMma, LaunchMmaOfSegments},
    // All loads of a window are in flight at once. In segments of 1024 steps
    // (1,12288,16384,12288,4) bf16 takes 197 us with the starts, ntc/short 216, and 191 without
    // segments. Only with seven taps and segments of 16 steps was ntc/short faster: 16.4 and 17.0
    // us for (4,1024,2048,1024,7) bf16.
    {"ntc/window", ntc::CanRunWindowOfSegments, Always, ntc::LaunchWindowOfSegments},
    // Rows of one segment are computed as without segments.
    {"ntc/short", ntc::CanRunShortOfSegments, Always, ntc::LaunchShortOfSegments},
    // The reason is the same: 209 us for (1,12288,16384,12288,4) bf16 in segments of 1024 steps,
    // where XLA takes 289, and 203 without segments.
    {"nct/causal", nct::CanRunCausalOfSegments, Always, nct::LaunchCausalOfSegments},
    // Every tap is read through the cache.
    {"packed", CanRunPacked, Always, LaunchPacked},
};
const Table<Forward> kPackedForward("lightweight_conv_packed", "forward", kPackedForwardFamilies);
const Table<Forward> kPackedPart("lightweight_conv_packed_part", "forward", kPackedForwardFamilies);

cudaError_t LaunchHeads(cudaStream_t stream, const Forward& call, const Device&) {
  const Forward stateless = WithoutState(call);
  const cudaError_t error = (IsPacked(stateless) ? kPackedPart : kPart).Run(stream, stateless);
  if (error != cudaSuccess) return error;
  return call.slots == nullptr ? LaunchPackedHeads(stream, call) : LaunchStateSteps(stream, call);
}

// CanMergeRows says whether the batch entries of an operand follow each other in memory.
template <int kOperands>
bool CanMergeRows(const jaxops::BatchMap<kOperands>& batch, int operand, const Geometry& g) {
  return batch.rank() == 0 || batch.stride(0, operand) == g.time * g.channels;
}

// MergeIntoSteps makes the batch entries of a call steps of one sequence, and says whether it
// could. A filter of one tap reads no other step, and kernels share work over time: without that,
// values of (8192,1,1024) took 59.4 us in bf16 NCT and 138 in f16 NTC, and take 12.6 and 12.5.
bool MergeIntoSteps(Geometry& g, int64_t entries) {
  constexpr int64_t kMaxTime = (int64_t{1} << 30) - 1;
  if (entries * g.time > kMaxTime) return false;
  g.time *= entries;
  g.dilation = 1;
  g.data_format = DataFormat::kNTC;
  return true;
}

Forward MergeEntries(Forward call) {
  const auto& batch = call.batch;
  if (AreEntriesSteps(call.geometry) && !IsPacked(call) && batch.rank() <= 1 &&
      SharesFilters(call) && CanMergeRows(batch, Forward::kX, call.geometry) &&
      CanMergeRows(batch, Forward::kY, call.geometry) &&
      MergeIntoSteps(call.geometry, batch.size())) {
    call.batch = {};
  }
  return call;
}

Backward MergeEntries(Backward call) {
  const auto& batch = call.summed;
  if (AreEntriesSteps(call.geometry) && !IsPacked(call) && batch.rank() <= 1 &&
      (call.dx == nullptr || batch.rank() == 0 || batch.stride(0, Backward::kWeight) == 0) &&
      CanMergeRows(batch, Backward::kX, call.geometry) &&
      CanMergeRows(batch, Backward::kG, call.geometry) &&
      (call.dx == nullptr || CanMergeRows(batch, Backward::kDx, call.geometry)) &&
      MergeIntoSteps(call.geometry, batch.size())) {
    call.summed = {};
  }
  return call;
}

// The input gradient is a forward convolution of g over every batch entry.
cudaError_t LaunchInputGrad(cudaStream_t stream, const Backward& call) {
  Forward forward{};
  forward.geometry = call.geometry;
  forward.geometry.padding = Mirrored(call.geometry);
  // The order of the entries does not matter, so the summed entries follow the kept ones.
  const std::array<int, Forward::kOperands> operands = {
      Backward::kG,      Backward::kWeight, Backward::kWeight, Backward::kStarts,
      Backward::kWeight, Backward::kWeight, Backward::kDx};
  if (!forward.batch.AppendFrom(call.kept, operands) ||
      !forward.batch.AppendFrom(call.summed, operands)) {
    return cudaErrorInvalidValue;
  }
  forward.dtype = call.dtype;
  forward.weight_dtype = call.weight_dtype;
  forward.bias_dtype = call.weight_dtype;
  forward.activation = Activation::kNone;
  forward.flip_taps = true;
  forward.x = call.g;
  forward.weight = call.weight;
  forward.bias = nullptr;
  forward.starts = call.starts;
  forward.state = nullptr;
  forward.state_dtype = call.dtype;
  forward.slots = nullptr;
  forward.num_slots = 0;
  forward.y = call.dx;
  return (IsPacked(forward) ? kPackedPart : kPart).Run(stream, forward);
}

using LaunchGradients = cudaError_t (*)(cudaStream_t, const Gradients&, const Device&);

bool Never(const Backward&) { return false; }

// WithInputGrad launches a family, and before it the input gradient if the family does not compute
// it.
template <LaunchGradients kLaunch, bool (*kComputesInputGrad)(const Backward&)>
cudaError_t WithInputGrad(cudaStream_t stream, const Gradients& gradients, const Device& device) {
  const Backward& call = gradients.call;
  if (call.dx != nullptr && !kComputesInputGrad(call)) {
    const cudaError_t error = LaunchInputGrad(stream, call);
    if (error != cudaSuccess) return error;
  }
  return kLaunch(stream, gradients, device);
}

constexpr Family<Gradients> kGradientFamilies[] = {
    // The reason is that of forward: 37.4 -> 18.1 us for (128,1024,64,16,3) bf16, 18.8 -> 17.3 for
    // (2,1024,4096,1024,4), 32.0 -> 28.5 for (16,1024,512,1024,4) f32; 37.6 -> 20.1 for
    // (128,1024,64,16,7) bf16.
    {"nct/causal", nct::CanRunCausal, PrefersCausal, nct::LaunchCausal},
    // The reason is that of forward: 463 -> 53.6 us for (4096,512,8,512,4) bf16, 145 -> 63.1 for
    // (254,512,129,512,4) f32.
    {"nct/rows", nct::CanRunRows, PrefersRows, nct::LaunchRows},
    // The reason is that of forward: 178 -> 34.5 us for (8,1024,2048,16,31) bf16 NTC, 172 -> 37.3
    // in NCT.
    {"mma", CanRunMma, PrefersMma, WithInputGrad<LaunchMma, ComputesInputGradMma>},
    // The reason is the same, where fewer channels share a filter, or filters are longer.
    {"mma/channels", CanRunMmaChannels, PrefersMmaChannels,
     WithInputGrad<LaunchMmaChannels, Never>},
    // Latency bounds a small call.
    {"nct/steps", nct::CanRunSteps, PrefersStepsNct, nct::LaunchSteps},
    // Taps meet whole vectors.
    {"nct/vectors", nct::CanRunVectors, Always, nct::LaunchVectors},
    // One pass computes all gradients of dilated filters.
    {"nct/segments", nct::CanRunSegments, PrefersSegments,
     WithInputGrad<nct::LaunchSegments, nct::ComputesInputGradSegments>},
    // One pass computes all gradients.
    {"nct/steps", nct::CanRunSteps, PrefersDilatedStepsNct, nct::LaunchSteps},
    // The window and the sums of the taps are in registers.
    {"nct/window", nct::CanRunWindow, Always,
     WithInputGrad<nct::LaunchWindow, nct::ComputesInputGradWindow>},
    // Every tap is read through the cache.
    {"nct/dilated", nct::CanRunDilated, Always, WithInputGrad<nct::LaunchDilated, Never>},
    // One pass reads x and g once: 168 -> 104 us for (4,2048,8192,2048,4) bf16.
    {"ntc/short", ntc::CanRunShort, Always, ntc::LaunchShort},
    // The window and the next rows are in registers, for any number of channels.
    {"ntc/scalar", ntc::CanRunScalar, Always, ntc::LaunchScalar},
    // Multiply-adds read their inputs from shared memory.
    {"ntc/long", ntc::CanRunLong, Always, WithInputGrad<ntc::LaunchLong, Never>},
};
const Table<Gradients> kGradients("lightweight_conv", "backward", kGradientFamilies);

constexpr Family<Gradients> kPackedGradientFamilies[] = {
    // Tensor cores multiply long filters, as without segments.
    {"mma", CanRunMma, PrefersMmaOfSegments,
     WithInputGrad<LaunchMmaOfSegments, ComputesInputGradMma>},
    // One pass reads x and g once: (1,12288,16384,12288,4) bf16 in segments of 1024 steps takes 305
    // us, in XLA 1110, and 296 without segments.
    {"ntc/short", ntc::CanRunShortOfSegments, Always, ntc::LaunchShortOfSegments},
    // The reason is the same: 332 us, XLA 467, and 323 without segments.
    {"nct/causal", nct::CanRunCausalOfSegments, Always, nct::LaunchCausalOfSegments},
    // Every tap is read through the cache.
    {"packed", CanRunPacked, Always, WithInputGrad<LaunchPacked, Never>},
};
const Table<Gradients> kPackedGradients("lightweight_conv_packed", "backward",
                                        kPackedGradientFamilies);

// RangeError says what of a geometry is too large for kernels, or nothing. They count a time step,
// a channel or a tap in 32 bits, also those of a tile of up to 256 steps beyond the end; arrays may
// be larger.
std::string RangeError(const Geometry& g) {
  constexpr int64_t kMax = (int64_t{1} << 30) - 1;
  const struct {
    const char* name;
    int64_t value, max;
  } sizes[] = {
      {"time", g.time, kMax},
      {"channels", g.channels, kMax},
      {"taps", g.taps, kMax},
      {"dilation", g.dilation, int64_t{1} << 22},
      {"(taps - 1) * dilation", (g.taps - 1) * g.dilation, kMax},
  };
  for (const auto& [name, value, max] : sizes) {
    if (value > max) {
      return std::string(name) + " must be at most " + std::to_string(max) + " on a GPU, got " +
             std::to_string(value);
    }
  }
  return "";
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Forward& call) {
  const Geometry& g = call.geometry;
  if (call.batch.size() == 0 || g.time == 0 || g.channels == 0) return cudaSuccess;
  if (const std::string error = RangeError(g); !error.empty()) {
    return jaxops::cuda::Refuse(cudaErrorInvalidValue, "lightweight_conv: " + error);
  }
  return (IsPacked(call) ? kPackedForward : kForward).Run(stream, MergeEntries(call));
}

cudaError_t LaunchBackward(cudaStream_t stream, const Backward& call, int64_t splits,
                           void* partials) {
  const Geometry& g = call.geometry;
  const int64_t kept = call.kept.size();
  if (kept == 0) return cudaSuccess;
  if (call.summed.size() == 0 || g.time == 0 || g.channels == 0) {
    const int64_t weights = kept * g.heads * g.taps * SizeOf(call.weight_dtype);
    const cudaError_t error = cudaMemsetAsync(call.dweight, 0, weights, stream);
    if (error != cudaSuccess || call.dbias == nullptr) return error;
    const int64_t biases = kept * g.channels * SizeOf(call.bias_dtype);
    return cudaMemsetAsync(call.dbias, 0, biases, stream);
  }
  if (const std::string error = RangeError(g); !error.empty()) {
    return jaxops::cuda::Refuse(cudaErrorInvalidValue, "lightweight_conv: " + error);
  }
  const Backward merged = MergeEntries(call);
  return (IsPacked(call) ? kPackedGradients : kGradients).Run(stream, {merged, splits, partials});
}

}  // namespace jaxops::lightweight_conv::cuda

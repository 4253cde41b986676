// Handlers of concatenation and splitting.
#include "common/concatenate.h"

#ifdef JAXOPS_PLATFORM_CUDA
#include "cuda/concatenate/launch.h"
#else
#include "cpu/concatenate.h"
#endif
#include "ffi/bind.h"
#include "ffi/decode.h"

namespace jaxops::ffi::concatenate {
namespace {

namespace xf = xla::ffi;
using jaxops::concatenate::Job;
using jaxops::concatenate::kMaxRowDims;

// The axis is followed by `inner` dimensions. Segment i of the result has `sizes[i]` entries along
// it: the first entries of array `sources[i]`, or zeros if that is -1.
struct ConcatenateAttributes {
  int64_t inner;
  Integers sizes, sources;
  JAXOPS_ATTRIBUTES(inner, sizes, sources);
};

// Part i begins with the `sizes[i]` entries of the operand from `starts[i]` on; the rest of it is
// zero.
struct SplitAttributes {
  int64_t inner;
  Integers starts, sizes;
  JAXOPS_ATTRIBUTES(inner, starts, sizes);
};

// An array as rows: its dimensions before the axis, and the bytes of one entry along the axis.
struct Rows {
  Dimensions dims;
  size_t axis;
  int64_t entry_bytes;
  char* data;

  Rows(const Buffer& array, int64_t inner)
      : dims(array.dimensions()),
        axis(dims.size() - 1 - inner),
        entry_bytes(xf::ByteWidth(array.element_type())),
        data(static_cast<char*>(array.untyped_data())) {
    for (size_t i = axis + 1; i < dims.size(); ++i) entry_bytes *= dims[i];
  }

  int64_t extent() const { return dims[axis]; }
  int64_t row_bytes() const { return extent() * entry_bytes; }
  int64_t rows() const {
    int64_t count = 1;
    for (size_t i = 0; i < axis; ++i) count *= dims[i];
    return count;
  }
  const char* end() const { return data + rows() * row_bytes(); }
};

// Returns whether an array can be a part of `whole`: `broadcasts` allows sizes 1 before the axis.
bool Fits(const Rows& part, const Rows& whole, bool broadcasts) {
  if (part.dims.size() != whole.dims.size()) return false;
  for (size_t i = 0; i < whole.dims.size(); ++i) {
    if (i == whole.axis || part.dims[i] == whole.dims[i]) continue;
    if (!(broadcasts && i < whole.axis && part.dims[i] == 1)) return false;
  }
  return true;
}

xf::Error Mismatch(const char* operation, const char* what, Dimensions got, Dimensions whole) {
  return InvalidArgument(operation, ": ", what, " ", ToString(got), " does not fit ",
                         ToString(whole));
}

bool HasAxis(const Buffer& array, int64_t inner) {
  return inner >= 0 && static_cast<int64_t>(array.dimensions().size()) > inner;
}

xf::Error RunMove(Context context, const Job& job) {
  for (const auto& destination : job.destinations) {
    ExpectWrites(destination.data, job.rows * destination.row_bytes);
  }
  return Run(context, "concatenate", JAXOPS_KERNEL(concatenate, Move), job);
}

xf::Error Concatenate(Context context, xf::RemainingArgs arrays, Result y,
                      const ConcatenateAttributes& attributes) {
  constexpr char kName[] = "concatenate";
  const auto& [inner, sizes, sources] = attributes;
  Job job;
  if (!HasAxis(*y, inner) || sizes.size() != sources.size()) {
    return InvalidArgument(kName, ": ", sizes.size(), " sizes, ", sources.size(), " sources and ",
                           inner, " dimensions after the axis of ", ToString(y->dimensions()));
  }
  const Rows whole(*y, inner);
  std::vector<Rows> inputs;
  inputs.reserve(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    const xf::ErrorOr<Buffer> array = arrays.get<Buffer>(i);
    if (!array) return array.error();
    if (!HasAxis(*array, inner)) {
      return Mismatch(kName, "array", array->dimensions(), whole.dims);
    }
    inputs.emplace_back(*array, inner);
    if (!Fits(inputs.back(), whole, true) || array->element_type() != y->element_type()) {
      return Mismatch(kName, "array", array->dimensions(), whole.dims);
    }
  }

  // Row dimensions along which the same inputs vary are merged.
  std::vector<uint32_t> varies(inputs.size(), 0);
  size_t last = whole.axis;
  for (size_t d = 0; d < whole.axis; ++d) {
    if (whole.dims[d] == 1) continue;
    bool merges = last != whole.axis;
    for (const Rows& input : inputs) {
      merges = merges && (input.dims[d] == 1) == (input.dims[last] == 1);
      job.broadcasts = job.broadcasts || input.dims[d] == 1;
    }
    last = d;
    if (merges) {
      job.row_sizes[job.row_dims - 1] *= whole.dims[d];
      continue;
    }
    if (job.row_dims == kMaxRowDims) {
      return InvalidArgument(kName, ": more than ", kMaxRowDims,
                             " alternations of batched and unbatched dimensions in nested vmaps");
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].dims[d] != 1) varies[i] |= uint32_t{1} << job.row_dims;
    }
    job.row_sizes[job.row_dims++] = whole.dims[d];
  }

  job.rows = whole.rows();
  job.pieces.reserve(sizes.size());
  int64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t source = sources[i];
    const bool good = sizes[i] >= 0 && sizes[i] <= whole.extent() - total && source >= -1 &&
                      source < static_cast<int64_t>(inputs.size()) &&
                      (source < 0 || sizes[i] <= inputs[source].extent());
    if (!good) {
      return InvalidArgument(kName, ": piece ", i, " of ", sizes[i], " from array ", source,
                             " does not fit ", ToString(whole.dims));
    }
    const int64_t extent = sizes[i] * whole.entry_bytes;
    total += sizes[i];
    if (source < 0 || extent == 0) {
      job.pieces.push_back({whole.data, whole.data, 0, 0, extent, 0});
    } else {
      const Rows& input = inputs[source];
      job.pieces.push_back(
          {input.data, input.end(), input.row_bytes(), extent, extent, varies[source]});
    }
  }
  if (total != whole.extent()) {
    return InvalidArgument(kName, ": pieces of ", total, " entries make ", ToString(whole.dims));
  }
  job.destinations = {{whole.data, whole.row_bytes(), 0, static_cast<int64_t>(sizes.size())}};
  return RunMove(context, job);
}

xf::Error Split(Context context, Buffer x, xf::RemainingRets parts,
                const SplitAttributes& attributes) {
  constexpr char kName[] = "split";
  const auto& [inner, starts, sizes] = attributes;
  Job job;
  if (!HasAxis(x, inner) || sizes.size() != starts.size() || parts.size() != sizes.size()) {
    return InvalidArgument(kName, ": ", sizes.size(), " sizes, ", starts.size(), " starts and ",
                           inner, " dimensions after the axis of ", ToString(x.dimensions()),
                           " for ", parts.size(), " parts");
  }
  const Rows whole(x, inner);
  job.rows = whole.rows();
  job.pieces.reserve(sizes.size());
  job.destinations.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const xf::ErrorOr<Result> result = parts.get<Buffer>(i);
    if (!result) return result.error();
    const Buffer array = *Result(*result);
    if (!HasAxis(array, inner)) return Mismatch(kName, "part", array.dimensions(), whole.dims);
    const Rows part(array, inner);
    const bool good = Fits(part, whole, false) && array.element_type() == x.element_type() &&
                      starts[i] >= 0 && sizes[i] >= 0 && sizes[i] <= part.extent() &&
                      starts[i] <= whole.extent() - sizes[i];
    if (!good) return Mismatch(kName, "part", part.dims, whole.dims);
    job.destinations.push_back({part.data, part.row_bytes(), static_cast<int64_t>(i), 1});
    // An array without elements may have a null address, to which no offset may be added.
    const char* source =
        whole.end() == whole.data ? part.data : whole.data + starts[i] * whole.entry_bytes;
    job.pieces.push_back({source, whole.end(), whole.row_bytes(), sizes[i] * whole.entry_bytes,
                          part.row_bytes(), 0});
  }
  return RunMove(context, job);
}

const Registration kConcatenate("jaxops_concatenate", kHandler<Concatenate>);
const Registration kSplit("jaxops_split", kHandler<Split>);

}  // namespace
}  // namespace jaxops::ffi::concatenate
